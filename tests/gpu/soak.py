"""Hours of use in a minute or two: clients that come and go, worker after worker, and every answer that comes to its end is the one that
a quiet worker gave. The part `soak` of tests/gpu/run.sh."""

import http.client
import json
import os
import random
import signal
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from harness import BACKEND, BIN, WORK, Process, Served, command, say, synth, used

SECONDS = float(os.environ.get("DS4_GPU_SOAK_S", "60"))
CLIENTS = 16
WINDOWS = 6
# What recorded steps may take of a device and of the host (`MAX_RECORDED` in kernels/src/cuda/driver/queue.rs), and 16 MiB.
GRAPHS_MIB, OF_HOST_MIB = 80, 144
SHARED = [1000 + i * 104729 % 25000 for i in range(400)]


def questions(rng):
    """Prompts by token ids: short and long ones, some with a prefix in common, so that banks are reused, rewound and evicted."""
    out = []
    for i in range(24):
        own = [1000 + rng.randrange(25000) for _ in range(rng.choice([3, 17, 120, 500]))]
        prefix = SHARED[: rng.choice([0, 0, 130, 256, 400])]
        out.append({"prompt": prefix + own, "max_tokens": rng.choice([1, 8, 24, 64])})
    return out


class Clients:
    """CLIENTS threads that ask until they are told to stop."""

    def __init__(self, served, asked, want, seed):
        self.served, self.asked, self.want = served, asked, want
        self.seen, self.wrong, self.until = Counter(), [], threading.Event()
        self.threads = [threading.Thread(target=self.client, args=(random.Random(seed * 1000 + i),)) for i in range(CLIENTS)]
        [t.start() for t in self.threads]

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.until.set()
        [t.join() for t in self.threads]

    def check(self):
        assert not self.wrong, f"{len(self.wrong)} answers differ from a quiet worker's: {self.wrong[:2]}"

    def client(self, rng):
        while not self.until.is_set():
            which = rng.randrange(len(self.asked))
            # Most read to the end; some hang up on the way, after some of the answer or none.
            patience = rng.choice([None, None, None, 0, 1, 5])
            try:
                text = ask(self.served.url, self.asked[which], patience, rng.random() < 0.5 or patience is not None)
            except (OSError, http.client.HTTPException) as e:
                # A worker that was killed, or one that is not there yet: its clients try again.
                self.seen[f"broken off: {type(e).__name__}"] += 1
                time.sleep(0.05)
                continue
            if text is None:
                self.seen["hung up"] += 1
            elif isinstance(text, int):
                self.seen[f"refused with {text}"] += 1
                time.sleep(0.05)
            else:
                self.seen["answered"] += 1
                if text != self.want[which]:
                    self.wrong.append({"question": which, "got": text[:120], "want": self.want[which][:120]})


def ask(url, question, patience, stream):
    """The answer's text; its status if it is refused; None once `patience` pieces of it have come."""
    where = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(where.hostname, where.port, timeout=60)
    try:
        body = {**question, "temperature": 0, "ignore_eos": True, "stream": stream}
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        if patience == 0:
            return None
        answer = connection.getresponse()
        if answer.status != 200:
            return answer.status
        if not stream:
            return json.load(answer)["choices"][0]["text"]
        text, pieces = "", 0
        for line in answer:
            if not line.startswith(b"data: "):
                continue
            if line.strip() == b"data: [DONE]":
                return text
            event = json.loads(line[6:])
            if "error" in event:
                raise http.client.HTTPException(event["error"])
            text += event["choices"][0]["text"] if event["choices"] else ""
            pieces += 1
            if pieces == patience:
                return None
        raise http.client.IncompleteRead(text.encode())
    finally:
        connection.close()


def resident_mib(worker):
    return int(next(l.split()[1] for l in Path(f"/proc/{worker.process.pid}/status").read_text().splitlines() if l.startswith("VmRSS"))) >> 10


def settled(served):
    """Waits until no request is left of those whose clients are gone."""
    for _ in range(200):
        if served.metric("engine_running") == 0 and served.metric("engine_queue_depth") == 0:
            return
        time.sleep(0.05)
    raise AssertionError("requests are left whose clients have gone")


def one_worker(served, asked, want, figures):
    """One worker for half of the time: what it has of the device beyond its banks, and of the host, has a bound."""
    worker = served.worker("--ctx", 1024)
    # All at once, twice: activations have the size that they will have.
    for _ in range(2):
        with ThreadPoolExecutor(len(asked)) as threads:
            assert list(threads.map(lambda q: ask(served.url, q, None, False), asked)) == want, "answers of a crowd differ"
    sizes = []
    for seed in range(WINDOWS):
        with Clients(served, asked, want, seed) as clients:
            time.sleep(SECONDS / 2 / WINDOWS)
        clients.check()
        settled(served)
        device, banks = used(), served.metric("engine_bank_bytes") >> 20
        sizes.append({"device_mib": device, "banks_mib": banks, "resident_mib": resident_mib(worker), **clients.seen})
        say("soak", sizes[-1])
    figures["one_worker"] = sizes
    worker.stop()
    device, resident = [s["device_mib"] - s["banks_mib"] for s in sizes], [s["resident_mib"] for s in sizes]
    assert device[-1] <= device[0] + GRAPHS_MIB, f"device memory grows: {device} MiB"
    assert resident[-1] <= resident[0] + OF_HOST_MIB, f"resident memory grows: {resident} MiB"


class Supervised:
    """`ds4 serve`, whose workers follow each other at one address."""

    def __init__(self, model):
        self.dir = Path(tempfile.mkdtemp(prefix="s", dir=WORK))
        port = 20000 + time.monotonic_ns() // 1000 % 12000
        self.url = f"http://127.0.0.1:{port}"
        self.process = Process(
            "ds4", "serve", "--model", model, "--backend", BACKEND, "--allow-dev-models", "--http", f"127.0.0.1:{port}",
            "--runtime-dir", self.dir, "--ctx", 1024, "--max-batch", 16
        )
        self.serving()

    metric = Served.metric

    def worker(self):
        """The worker's process id."""
        status = json.loads(command(BIN / "ds4", "ctl", "--runtime-dir", self.dir, "status", "--json"))
        return status["worker"]["pid"]

    def serving(self):
        """Waits until a worker answers, and says how long that was."""
        begun = time.monotonic()
        while True:
            try:
                urllib.request.urlopen(self.url + "/health", timeout=5).read()
                return time.monotonic() - begun
            except OSError:
                assert self.process.process.poll() is None, self.process.text()[-1500:]
                assert time.monotonic() - begun < 60, "no worker came back: " + self.process.text()[-1500:]
                time.sleep(0.01)


def many_workers(path, asked, want, figures, rng):
    """Worker after worker under the same clients, for half of the time: killed, or replaced once they have finished what they have."""
    served, ends = Supervised(path), Counter()
    back, until = [], time.monotonic() + SECONDS / 2
    with Clients(served, asked, want, 7) as clients:
        while time.monotonic() < until:
            time.sleep(rng.uniform(0.5, 3))
            if rng.random() < 0.5:
                os.kill(served.worker(), signal.SIGKILL)
                ends["killed"] += 1
                time.sleep(0.02)
            else:
                command(BIN / "ds4", "ctl", "--runtime-dir", served.dir, "restart")
                ends["replaced"] += 1
            back.append(served.serving())
    clients.check()
    settled(served)
    figures["many_workers"] = {"ends": ends, "back_s_worst": round(max(back), 3), **clients.seen}
    say("soak", figures["many_workers"])
    assert served.process.stop() == 0, served.process.text()[-1500:]
    assert clients.seen["answered"] > 5 * sum(ends.values()), "hardly an answer came to its end"


def part_soak():
    path = WORK / "soak.gguf"
    figures = synth("small", path)
    before = used()
    served = Served(path, BACKEND)
    time.sleep(0.7)
    with_weights = used()
    rng = random.Random(int(os.environ.get("DS4_SEED", "1")))
    asked = questions(rng)
    worker = served.worker("--ctx", 1024)
    want = [ask(served.url, q, None, False) for q in asked]
    worker.stop()
    one_worker(served, asked, want, figures)
    time.sleep(0.5)
    assert used() == with_weights, f"{used()} MiB used after the last worker, {with_weights} before the first"
    served.stop()
    many_workers(path, asked, want, figures, rng)
    time.sleep(0.5)
    assert used() == before, f"{used()} MiB used at the end, {before} at the start"
    return figures
