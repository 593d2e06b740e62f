"""Processes of the product on a machine with a card, and what they are asked: for tests/gpu/run.sh. Standard library only."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.error
import urllib.request
from pathlib import Path

BIN, FIXTURES, OUT = (Path(a).resolve() for a in sys.argv[1:4])
BACKEND = os.environ.get("DS4_GPU_BACKEND", "cuda-vmm")  # memfd: the script itself can be tried without a card
KIND = "cuda" if BACKEND == "cuda-vmm" else "cpu"
PROMPTS = [
    "The capital of France is",
    "fn main() {",
    "Once upon a time there was a very small model that",
    "1, 2, 3, 4,",
    "Zwölf Boxkämpfer jagen Viktor quer über den großen Sylter Deich. " * 8,
]
WORK = Path(tempfile.mkdtemp(prefix="ds4-gpu-"))
report = {"checks": {}, "failed": []}


def say(*what):
    print(f"[{time.monotonic() - START:.1f} s]", *what, flush=True)


START = time.monotonic()


def command(*args, **kw):
    done = subprocess.run([str(a) for a in args], capture_output=True, text=True, **kw)
    if done.returncode != 0:
        raise AssertionError(f"{args[0]} ended with {done.returncode}: {(done.stderr or done.stdout)[-800:]}")
    return done.stdout


def used():
    """Device memory in use, MiB, once processes that have just ended are gone: a context takes a while to go."""
    last = used_now()
    for _ in range(20):
        time.sleep(0.15)
        last, before = used_now(), last
        if last == before:
            break
    return last


def used_now():
    if BACKEND != "cuda-vmm":
        return 0
    return int(command("nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits").split()[0])


class Process:
    def __init__(self, program, *args, **environment):
        self.log = WORK / f"{program}-{time.monotonic_ns()}.log"
        # `ds4` has its flags behind a subcommand.
        command, args = (args[:1], args[1:]) if program == "ds4" else ((), args)
        self.args = [str(BIN / program), *command, "--config", "/dev/null", *map(str, args)]
        self.begun = time.monotonic()
        self.process = subprocess.Popen(
            self.args, stdout=self.log.open("w"), stderr=subprocess.STDOUT, env={**os.environ, **environment}
        )

    def text(self):
        return self.log.read_text(errors="replace")

    def wait_for(self, word, seconds=240):
        end = time.monotonic() + seconds
        while word not in self.text():
            if self.process.poll() is not None or time.monotonic() > end:
                raise AssertionError(f"{Path(self.args[0]).name}: no {word!r}: {self.text()[-1500:]}")
            time.sleep(0.005)
        self.took = time.monotonic() - self.begun
        return self

    def stop(self, how=signal.SIGTERM):
        if self.process.poll() is None:
            self.process.send_signal(how)
        try:
            return self.process.wait(40)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError("it does not stop: " + self.text()[-800:])


class Served:
    """An owner of one model in a runtime directory of its own."""

    def __init__(self, model, backend, *flags, **environment):
        self.dir = Path(tempfile.mkdtemp(prefix="r", dir=WORK))
        self.owner = Process(
            "ds4-weight-owner", "--runtime-dir", self.dir, "--allow-dev-models", "--backend", backend, "--model", model, *flags,
            **environment
        )
        if not environment:
            self.owner.wait_for("ready models")

    def worker(self, *flags):
        return self.start_worker(*flags).wait_for("ready in")

    def start_worker(self, *flags, **environment):
        port = 20000 + time.monotonic_ns() // 1000 % 12000
        self.url = f"http://127.0.0.1:{port}"
        return Process(
            "ds4-worker", "--runtime-dir", self.dir, "--http", f"127.0.0.1:{port}",
            *(() if "--max-batch" in flags else ("--max-batch", 16)), *(() if "--ctx" in flags else ("--ctx", 1024)), *flags,
            **environment
        )

    def complete(self, prompt, tokens=48):
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True, "logprobs": 1}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=120) as answer:
                choice = json.load(answer)["choices"][0]
        except urllib.error.HTTPError as e:
            raise AssertionError(f"{prompt[:20]!r}: {e}: {e.read()[:300]}") from e
        return choice["text"], (choice.get("logprobs") or {}).get("tokens") or []

    def timed(self, prompt, tokens):
        """Tokens per second of a prompt, given by its ids, and of its answer, as the worker timed them."""
        body = {"prompt": prompt, "max_tokens": tokens, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            self.url + "/v1/completions", json.dumps(body).encode(), {"content-type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=240) as answer:
            t = json.load(answer)["timings"]
        return round(t["prompt_n"] * 1e3 / t["prompt_ms"], 1), round((t["predicted_n"] - 1) * 1e3 / t["predicted_ms"], 1)

    def metric(self, name):
        text = urllib.request.urlopen(self.url + "/metrics", timeout=10).read().decode()
        return int(next(float(l.split()[-1]) for l in text.splitlines() if l.startswith(("ds4_" + name + " ", "ds4_" + name + "_total "))))

    def all(self):
        return [self.complete(p) for p in PROMPTS]

    def together(self):
        out = [None] * 3 * len(PROMPTS)

        def one(i):
            out[i] = self.complete(PROMPTS[i % len(PROMPTS)])

        threads = [threading.Thread(target=one, args=(i,)) for i in range(len(out))]
        [t.start() for t in threads]
        [t.join() for t in threads]
        return out

    def stop(self):
        self.owner.stop()


def quietly(what, *args):
    try:
        what(*args)
    except (OSError, http.client.HTTPException):
        pass


def bench(*args):
    return json.loads(command(BIN / "ds4", "bench", "--json", *args, "--backend", BACKEND, "--allow-dev-models"))


def synth(shape, path, *flags):
    begun = time.monotonic()
    command(BIN / "ds4", "gguf", "synth", "--shape", shape, "--recipe", "q2", "-o", path, *flags)
    return {"synth_s": round(time.monotonic() - begun, 1), "bytes": path.stat().st_size}
