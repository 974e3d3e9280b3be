"""The names by which `eagle-plugin deploy` and a server find each other: a variable and the files of its folder."""

from typing import NamedTuple

FOLDER = "EAGLE_DEPLOY"  # the environment variable that names the folder
SERVER = "server.json"  # written by the server: the fields of `Served`, its pid, and why it exchanges nothing
REQUEST = "request.json"  # written by the command: id, head
ANSWER = "answer.json"  # written by the server: id, head, error, seconds
COUNTS = "counts.json"  # written by the command: the server's rounds when its present head came, its pid and head


class Served(NamedTuple):
    """What the command must know of a server; target and head are folders, algorithm is EAGLE or EAGLE3."""

    engine: str
    target: str
    head: str
    algorithm: str
