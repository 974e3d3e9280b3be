"""The sources of a feature store and their terms, in one object that stores of earlier versions do not have."""

from __future__ import annotations

import json
from collections.abc import Collection
from pathlib import Path

from eagle_plugin.common.errors import json_fault
from eagle_plugin.learning.data.provenance import (
    STORE_FILE,
    Sources,
    Terms,
    format_sources,
    join_sources,
    parse_sources,
    read_sources,
)
from eagle_plugin.learning.data.rows import DataError, read_rows
from eagle_plugin.learning.data.store.objects import Folder


def stored_sources(folder: Folder) -> Sources:
    """The sources of a store; empty if nothing says them.

    Raises:
        DataError: the object holds something else.
    """
    where = f"{folder.url}/{STORE_FILE}"
    try:
        found = json.loads(folder.read(STORE_FILE))
    except FileNotFoundError:
        return {}
    except (ValueError, RecursionError) as error:
        raise DataError(f"{where} {json_fault(error)}; remove it: the licences are then unknown") from error
    return parse_sources(found if isinstance(found, dict) else {"sources": found}, where)


def add_sources(folder: Folder, rows: str | Path, stored: Collection[str] = ()) -> None:
    """Record the sources of a file of rows that go into a store, beside those that are in it.

    stored: the sources of the documents that are there. Nothing is written while nothing is known of any source.
    """
    known, earlier = read_sources(Path(rows)), stored_sources(folder)
    if not known and not earlier:
        return
    new = {source: known.get(source, Terms()) for source in sorted({row.source for row in read_rows(rows)})}
    before = {source: Terms() for source in stored} | earlier
    if (found := join_sources(before, new)) != earlier:
        folder.replace(STORE_FILE, format_sources(found).encode())
