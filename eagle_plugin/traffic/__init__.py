"""Records what a server answers, as training data: the part that runs inside the server.

A middleware copies requests and answers, a bounded queue takes them, a thread hands them to the writer process
(`eagle_plugin.learning.data.traffic`), which filters private data and only then writes. Nothing of an engine is
imported here.
"""
