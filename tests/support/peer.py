"""A server for the tests of the HTTP client: a process that speaks the streamed chat protocol with known timing.

Run as `python peer.py PORT [--die-after-start] [--gap SECONDS] [--import MODULE]`. The question sets the behaviour:
see `Handler.do_POST`.
"""

import importlib
import json
import os
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FIRST_S, GAP_S = 0.15, 0.05
under_way, peak, flushes = 0, 0, 0
headers: dict[str, str] = {}  # of the last question
lock = threading.Lock()


def delta_with(question: str, number: int, word: str) -> dict:
    """The delta with one word of an answer."""
    if question == "think":
        return {"content": None, "reasoning_content": word, "reasoning": word}  # one word under both names
    if question == "reason":
        return {"reasoning": word}
    if question == "call":
        call = {"index": number % 2, "function": {"arguments": word}}
        if number < 2:
            call |= {"id": f"call_{time.time_ns()}", "type": "function"}
            call["function"] = {"name": f"tool{number}", "arguments": word}
        return {"tool_calls": [call]}
    return {"content": word}


class Handler(BaseHTTPRequestHandler):
    """Answers the few paths that the client uses."""

    protocol_version = "HTTP/1.1"

    def log_message(self, format: str, *args: object) -> None:
        print(self.path, flush=True)

    def _json(self, body: object, status: int = 200) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_GET(self) -> None:
        """Health, model list and server information."""
        answers = {
            "/health": {},
            "/v1/models": {"object": "list", "data": [{"id": "peer", "object": "model"}]},
            "/server_info": {"version": "9.9", "peak": peak, "flushes": flushes, "headers": headers},
        }
        self._json(answers.get(self.path, {}), 200 if self.path in answers else 404)

    def _event(self, body: dict | str) -> None:
        text = body if isinstance(body, str) else json.dumps({"id": "1", "object": "chat.completion.chunk", **body})
        data = f"data: {text}\n\n".encode()
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")
        self.wfile.flush()

    def do_POST(self) -> None:
        """A streamed answer of `max_tokens` words.

        `error` is refused, `cut` ends early, `quiet` has no text, `differ` has another text if the plugin is off.
        `think` and `reason` stream their words as reasoning, `call` as the arguments of two tool calls, with ids that
        no other answer has; `think differ` is as `differ`.
        """
        global under_way, peak, flushes, headers
        body = json.loads(self.rfile.read(int(self.headers.get("Content-Length") or 0)) or b"{}")
        if self.path.startswith("/flush_cache"):
            flushes += 1
            return self._json({})
        question = body["messages"][0]["content"]
        headers = {name.lower(): value for name, value in self.headers.items()}
        if question == "error":
            return self._json({"error": {"message": "no room"}}, 503)
        with lock:
            under_way += 1
            peak = max(peak, under_way)
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self._event({"choices": [{"index": 0, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}]})
        time.sleep(FIRST_S)
        tokens = body["max_tokens"]
        letter = "x" if question.endswith("differ") and os.environ.get("EAGLE_PLUGIN") == "0" else "w"
        for number in range(0 if question == "quiet" else tokens):
            if number:
                time.sleep(GAP_S)
            delta = delta_with(question.split()[0], number, f"{letter}{number} ")
            word = {"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}
            if body["stream_options"].get("continuous_usage_stats"):
                word["usage"] = {"prompt_tokens": 3, "completion_tokens": number + 1, "total_tokens": number + 4}
            self._event(word)
        with lock:
            under_way -= 1
        if question == "cut":
            self.wfile.write(b"0\r\n\r\n")
            return None
        self._event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]})
        if body.get("return_spec_tokens_details") and "slow" not in question:
            self._event({"choices": [], "sglext": {"spec_tokens_details": {"spec_verify_ct": 2}}})
        usage = {"prompt_tokens": 3, "completion_tokens": tokens, "total_tokens": tokens + 3}
        self._event({"choices": [], "usage": usage})
        self._event("[DONE]")
        self.wfile.write(b"0\r\n\r\n")
        return None


if __name__ == "__main__":
    if os.environ.get("EAGLE_PLUGIN") != "0":
        print("eagle-plugin 0: EAGLE3 is served by the plugin's tree worker (peer)", flush=True)
    if "--die-after-start" in sys.argv:
        print("HeadError: the head has hidden size 7, the target 576", file=sys.stderr, flush=True)
        raise SystemExit(3)
    if "--import" in sys.argv:
        importlib.import_module(sys.argv[sys.argv.index("--import") + 1])
    if "--gap" in sys.argv:
        FIRST_S = GAP_S = float(sys.argv[sys.argv.index("--gap") + 1])
    ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
