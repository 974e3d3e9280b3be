"""Puts whole documents into the shards of a server, as its writer does with those that it reads."""

from __future__ import annotations

from eagle_plugin.learning.data.collecting.shards import OpenShards
from eagle_plugin.learning.data.store.shards import Document, Entry, encode_into


def keep_document(shards: OpenShards, document: Document) -> None:
    """Add a document. Raises DataError: it is not what the manifest asks for."""
    n, marked = len(document.ids), int(document.mask.sum())
    place = shards.place(n)
    encode_into(document, shards.manifest, place)
    shards.keep(Entry(document.id, document.source, document.split, "", 0, n, marked, ""), place)


def write_kept(shards: OpenShards) -> int:
    """Write all documents; how many became whole since the last call. Raises what kept one from it."""
    shards.send_on()
    written = shards.written(all=True)
    for one in written:
        if one.error is not None:
            raise one.error
    return sum(one.documents for one in written)
