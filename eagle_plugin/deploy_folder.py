"""The names by which `eagle-plugin deploy` and a server find each other: a variable and the files of its folder."""

FOLDER = "EAGLE_DEPLOY"  # the environment variable that names the folder
SERVER = "server.json"  # written by the server: engine, target, head, algorithm, pid, and why it exchanges nothing
REQUEST = "request.json"  # written by the command: id, head
ANSWER = "answer.json"  # written by the server: id, head, error, seconds
