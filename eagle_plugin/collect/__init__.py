"""Writes the target's hidden states of requests that ask for it, as training data: the part that runs in a server.

A worker copies the states of its steps to the host, a bounded queue takes finished documents, and a thread hands them
to the writer process (`eagle_plugin.learning.data.collecting`), which writes the feature store.
"""
