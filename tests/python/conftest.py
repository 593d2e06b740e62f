"""A real owner and worker for the Python clients, in a runtime directory of their own."""

import contextlib
import json
import os
import pathlib
import signal
import subprocess
import tempfile
import time

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BIN = ROOT / "target" / "release"


def starter_model() -> str:
    given = os.environ.get("DS4_STARTER_MODEL")
    cache = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    path = given or os.path.join(cache, "ds4/models/SmolLM2-135M-Instruct.Q4_1.gguf")
    assert os.path.exists(path), f"{path} is missing: scripts/test fetches it (`ds4 pull`)"
    return path


class Served:
    """`ds4 serve` and where to reach it."""

    def __init__(self, directory: str, *args: str):
        self.dir = directory
        env = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
        self.env = dict(env, DS4_CONFIG="/dev/null", DS4_RUNTIME_DIR=directory)
        self.log = open(os.path.join(directory, "serve.log"), "w")
        self.process = subprocess.Popen(
            [BIN / "ds4", "serve", *args, "--http", "127.0.0.1:0"],
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=self.log,
            stderr=self.log,
        )
        deadline = time.monotonic() + 60
        while True:
            status = self.ctl("status")
            if status and (status["worker"] or {}).get("state") == "ready":
                break
            assert self.process.poll() is None and time.monotonic() < deadline, self.text()
            time.sleep(0.05)
        self.url = "http://" + status["worker"]["http"]
        self.model = status["worker"]["model"]

    @classmethod
    @contextlib.contextmanager
    def running(cls, *args: str):
        with tempfile.TemporaryDirectory(prefix="ds4p-") as directory:
            it = cls(directory, *args)
            yield it
            it.stop()

    def ctl(self, *args):
        done = subprocess.run([BIN / "ds4", "ctl", "--json", *args], env=self.env, capture_output=True, text=True)
        return json.loads(done.stdout) if done.returncode == 0 else None

    def text(self):
        return pathlib.Path(self.dir, "serve.log").read_text()

    def stop(self):
        self.process.send_signal(signal.SIGTERM)
        try:
            code = self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        assert code == 0, self.text()


@pytest.fixture(scope="session")
def served():
    with Served.running("--model", starter_model()) as it:
        yield it
