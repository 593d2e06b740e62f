"""What tests/gpu/run.sh runs; see there. Standard library only."""

import http.client
import json
import os
import platform
import shutil
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
PARTS = sys.argv[4:] or ["device", "tiny", "memory", "small"]
BACKEND = os.environ.get("DS4_GPU_BACKEND", "cuda-vmm")  # memfd: the script itself can be tried without a card
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
        self.args = [str(BIN / program), "--config", "/dev/null", *map(str, args)]
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
        port = 20000 + time.monotonic_ns() // 1000 % 20000
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

    def prefilled(self):
        """Prompt tokens that the worker has computed so far."""
        text = urllib.request.urlopen(self.url + "/metrics", timeout=10).read().decode()
        return int(sum(float(l.split()[-1]) for l in text.splitlines() if "engine_prefill_tokens" in l and l[0] != "#"))

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


def agreement(a, b):
    """Tokens that are equal before the first that differs, over all prompts, and how many there are."""
    equal = total = 0
    for (text_a, tokens_a), (text_b, tokens_b) in zip(a, b):
        xs, ys = (tokens_a, tokens_b) if tokens_a else (list(text_a), list(text_b))
        same = next((i for i, (x, y) in enumerate(zip(xs, ys)) if x != y), min(len(xs), len(ys)))
        equal, total = equal + same, total + max(len(xs), len(ys))
    return equal, total


def end_to_end(name, model, must_equal):
    out = {}
    host = Served(model, "memfd")
    worker = host.worker()
    want = host.all()
    worker.stop()
    host.stop()
    say(name, "CPU worker answered")
    before = used()
    served = Served(model, BACKEND)
    time.sleep(0.7)  # the loader's end
    with_weights = used()
    worker = served.worker()
    out["ready_s"] = round(worker.took, 3)
    out["ready_log"] = worker.text().split("ready in", 1)[1].split("\n")[0][:200]
    status = json.loads(command(BIN / "ds4", "ctl", "--runtime-dir", served.dir, "status", "--json"))
    out["device"] = next((w.get("device") for w in [status.get("worker") or status] if isinstance(w, dict)), None)
    if BACKEND == "cuda-vmm":
        assert "cuda" in json.dumps(status), status
    got = served.all()
    equal, total = agreement(want, got)
    out["greedy_tokens_equal_to_cpu"] = [equal, total]
    again = served.all()
    assert again == got, f"{name}: the same prompts again give other tokens"
    crowd = served.together()
    assert all(c == got[i % len(PROMPTS)] for i, c in enumerate(crowd)), f"{name}: tokens differ in a batch of {len(crowd)}"
    out["equal_in_a_batch_of"] = len(crowd)
    worker.stop()
    if BACKEND == "cuda-vmm":
        plain = served.worker("--cuda-graphs=false")
        assert served.all() == got, f"{name}: other tokens without graphs"
        out["equal_without_graphs"] = True
        plain.stop()
    # Death in the middle of decoding, then of the owner under a worker.
    worker = served.worker()
    asking = threading.Thread(target=lambda: served_quietly(served))
    asking.start()
    time.sleep(0.3)
    worker.stop(signal.SIGKILL)
    asking.join()
    time.sleep(0.5)
    assert used() == with_weights, f"{name}: {used()} MiB used after a SIGKILL of the worker, {with_weights} before"
    worker = served.worker()
    assert served.all() == got, f"{name}: other tokens after a SIGKILL"
    served.owner.stop(signal.SIGKILL)
    assert served.all() == got, f"{name}: other tokens without the owner"
    worker.stop()
    time.sleep(0.5)
    assert used() == before, f"{name}: {used()} MiB used at the end, {before} at the start"
    out["device_mib"] = {"before": before, "with_weights": with_weights, "after": used()}
    served = Served(model, BACKEND)
    figures = json.loads(
        command(BIN / "ds4-worker", "--config", "/dev/null", "--runtime-dir", served.dir, "--self-test", "--verify-weights",
                "--self-test-cycles", 200)
    )
    out["attach"] = figures
    served.stop()
    if must_equal:
        assert equal == total, f"{name}: {equal} of {total} greedy tokens are those of the CPU"
    return out


def killed_mid_prefill(served, tokens, *flags):
    """SIGKILL of a worker in the middle of a prompt of `tokens` tokens; the next one answers. Device memory as before."""
    with_weights = used()
    worker = served.worker(*flags)
    want = served.complete(PROMPTS[0])
    before, prompt = served.prefilled(), [1000 + i * 104729 % 25000 for i in range(tokens)]
    asking = threading.Thread(target=quietly, args=(served.timed, prompt, 2))
    asking.start()
    done = 0
    while done == 0:
        assert asking.is_alive(), "the prompt was done before anything was seen of it"
        done = served.prefilled() - before
    worker.stop(signal.SIGKILL)
    asking.join()
    assert done < tokens, f"all of {tokens} tokens were computed before the kill"
    time.sleep(0.5)
    assert used() == with_weights, f"{used()} MiB used after a SIGKILL in the middle of a prompt, {with_weights} before"
    worker = served.worker(*flags)
    assert served.complete(PROMPTS[0]) == want, "another answer after a SIGKILL in the middle of a prompt"
    worker.stop()
    return {"tokens": tokens, "computed_before_the_kill": done, "device_mib": with_weights}


def quietly(what, *args):
    try:
        what(*args)
    except (OSError, http.client.HTTPException):
        pass


def served_quietly(served):
    quietly(served.complete, PROMPTS[0], 900)


def bench(*args):
    return json.loads(command(BIN / "ds4", "bench", "--json", *args, "--backend", BACKEND, "--allow-dev-models"))


def synth(shape, path, *flags):
    begun = time.monotonic()
    command(BIN / "ds4", "gguf", "synth", "--shape", shape, "--recipe", "q2", "-o", path, *flags)
    return {"synth_s": round(time.monotonic() - begun, 1), "bytes": path.stat().st_size}


def part_device():
    path = WORK / "device.json"
    kind = "cuda" if BACKEND == "cuda-vmm" else "cpu"
    command(BIN / "gpu", kind, path, env={**os.environ, "DS4_FIXTURES": str(FIXTURES)})
    return json.loads(path.read_text())


def part_tiny():
    models = {"tiny-v4": FIXTURES / "deepseek_v4/tiny-v4.gguf", "tiny-llama": FIXTURES / "tiny-llama/tiny-llama.gguf"}
    out = {name: end_to_end(name, path, True) for name, path in models.items()}
    kind = "cuda" if BACKEND == "cuda-vmm" else "cpu"
    kernels = json.loads(command(BIN / "ds4", "bench", "--json", "kernel", "hyper", "--device", kind, *([] if kind == "cuda" else ["--tiny"])))
    out["bench_kernel"] = {"device": kernels["device"], "lines": len(kernels["lines"]), "failed": kernels["failed"]}
    return out


def part_starter():
    model = Path(os.environ["DS4_STARTER_MODEL"]).resolve()
    kind = "cuda" if BACKEND == "cuda-vmm" else "cpu"
    path = WORK / "starter.json"
    command(BIN / "gpu", kind, path, "smollm2", env={**os.environ, "DS4_FIXTURES": str(FIXTURES)})
    out = {"transformers": json.loads(path.read_text())}
    assert out["transformers"]["checks"], "the example left SmolLM2 out"
    say("as transformers", json.dumps(out["transformers"]["checks"]))
    report["checks"]["starter"] = out
    out["throughput"] = bench("throughput", "--model", model, "--repeats", "2")
    say("throughput", json.dumps(out["throughput"])[:500])
    out["end_to_end"] = end_to_end("starter", model, True)
    return out


def part_memory():
    """Allocations of a worker are refused one at a time (DS4_CUDA_REFUSE): the worker says so and ends, or answers that request with
    503 and the next as ever. All of them, every 16th first, as far as DS4_GPU_MEMORY_S seconds (60) go; DS4_GPU_MEMORY=FROM-TO takes a part of
    them, and the loads' only with the first. DS4_GPU_LANES workers (8) at once."""
    model = FIXTURES / "deepseek_v4/tiny-v4.gguf"
    end = time.monotonic() + float(os.environ.get("DS4_GPU_MEMORY_S", "60"))
    first, last = map(int, os.environ.get("DS4_GPU_MEMORY", "1-2000").split("-"))
    before = used()
    served = Served(model, BACKEND)
    worker = served.worker("--max-batch", 2)
    want = [served.complete(p, 8) for p in PROMPTS]
    worker.stop()
    served.stop()
    seen, lock = {}, threading.Lock()
    most = [last + 1]  # there are fewer allocations than this
    numbers = iter([n for start in (16, 8, 12, 4, *range(1, 16)) for n in range(start, last + 1, 16) if n >= first])

    def following():
        with lock:
            for n in numbers:
                if n < most[0] and n not in seen:
                    seen[n] = {}
                    return n
        return None

    def lane():
        mine = Served(model, BACKEND)
        while time.monotonic() < end and (n := following()) is not None:
            try:
                what = refused_once(mine, n, want)
            except Exception as e:
                what = {"wrong": f"{type(e).__name__}: {e}"}
            with lock:
                if what is None:
                    most[0] = min(most[0], n)
                    del seen[n]
                else:
                    seen[n] = what
            if what and "wrong" in what:
                say("allocation", n, what)
        mine.stop()

    lanes = [threading.Thread(target=lane) for _ in range(int(os.environ.get("DS4_GPU_LANES", "8")))]
    [t.start() for t in lanes]
    loads = loads_refused(model) if BACKEND == "cuda-vmm" and first == 1 else {}
    [t.join() for t in lanes]
    wrong = {n: w["wrong"] for n, w in seen.items() if "wrong" in w}
    kinds = {}
    for n in sorted(seen):
        kinds.setdefault(seen[n].get("outcome"), []).append(n)
    time.sleep(0.5)
    out = {
        "loads_refused": loads,
        "allocations_fewer_than": most[0],
        "refused": len(seen),
        "not_tried": [n for n in range(first, most[0]) if n not in seen],
        "outcomes": {k: len(v) for k, v in kinds.items()},
        "device_mib": [before, used()],
        "each": {n: f"{seen[n].get('outcome')}: {seen[n].get('call')}: {seen[n].get('said', '')}"[:200] for n in sorted(seen)},
    }
    report["checks"]["memory"] = out
    say({k: v for k, v in out.items() if k != "each"})
    assert seen and not wrong, f"{len(wrong)} of {len(seen)}: {list(wrong.items())[:4]}"
    assert used() == before, f"{used()} MiB used at the end, {before} at the start"
    return out


def loads_refused(model):
    """Every allocation of a load is refused once: the owner that was to begin with this model says so and ends with code 5."""
    each, cpus = {}, os.sched_getaffinity(0)
    # Each of a loader's threads has buffers: two threads have all kinds of them.
    os.sched_setaffinity(0, set(sorted(cpus)[:2]))
    for n in range(1, 200):
        served = Served(model, BACKEND, DS4_CUDA_REFUSE=str(n))
        try:
            served.owner.wait_for("ready models", 20)
        except AssertionError:
            text = served.owner.text()
            said = next((l for l in reversed(text.splitlines()) if "memory" in l.lower()), "")
            assert served.owner.process.poll() == 5, f"{n}: {served.owner.process.poll()}: {text[-400:]}"
            assert "is refused" in text and said, f"{n}: {text[-400:]}"
            each[n] = said.strip()[-140:]
        else:
            assert "is refused" not in served.owner.text(), f"{n}: it goes on without what was refused"
            served.stop()
            os.sched_setaffinity(0, cpus)
            return each
    raise AssertionError("a load has no end of allocations")


def refused_once(served, n, want):
    """What became of the `n`-th allocation's refusal; None when there were fewer."""
    worker = served.start_worker("--max-batch", 2, DS4_CUDA_REFUSE=str(n))
    try:
        try:
            worker.wait_for("ready in", 20)
        except AssertionError:
            pass
        outcome, said = "unchanged", ""
        if worker.process.poll() is None:
            for k in [1, 4]:
                try:
                    answer = served.complete(PROMPTS[k], 8)
                    assert answer == want[k], f"another answer: {answer}"
                except AssertionError as e:
                    if "503" not in str(e):
                        raise
                    assert "out_of_memory" in str(e), e
                    outcome, said = "503", str(e)
                except (OSError, http.client.HTTPException):
                    break
        if worker.process.poll() is None:
            for k in [0, 1, 4]:
                answer = served.complete(PROMPTS[k], 8)
                assert answer == want[k], f"another answer afterwards: {answer}"
        text = worker.text()
        refused = next((l for l in text.splitlines() if "is refused" in l), None)
        if worker.process.poll() is not None:
            code, said = worker.process.returncode, text.splitlines()[-1]
            assert refused and code in (5, 71), f"ended with {code}: {text[-300:]}"
            assert "memory" in said.lower(), f"ended without saying why: {said}"
            outcome = f"ended with {code}"
        if refused is None:
            return None
        return {"outcome": outcome, "said": said.strip()[-120:], "call": refused.split(": ")[1].split(" is refused")[0]}
    finally:
        if worker.process.poll() is None:
            worker.stop(signal.SIGKILL)


def part_small():
    path = WORK / "small.gguf"
    out = synth("small", path)
    out["end_to_end"] = end_to_end("small", path, False)
    served = Served(path, BACKEND)
    # One token a step: long enough to be hit.
    out["killed_mid_prefill"] = killed_mid_prefill(served, 900, "--prefill-chunk", "1")
    served.stop()
    out["guesses"] = guesses(path)
    out["restart"] = bench("restart", "--model", path, "--cycles", os.environ.get("DS4_GPU_CYCLES", "20"))
    return out


def full_by_hand(path):
    """What `ds4 bench` does not measure: the load, decode at 2k of context with graphs and without, and the worker's memory."""
    out = {}
    before = used()
    served = Served(path, BACKEND)
    out["owner_ready_s"] = round(served.owner.took, 2)
    out["owner_stages"] = [l.split("INFO")[-1].strip()[:160] for l in served.owner.text().splitlines() if "stage=" in l]
    time.sleep(0.7)
    with_weights = used()
    for graphs in [True, False]:
        worker = served.worker("--ctx", 4096, f"--cuda-graphs={str(graphs).lower()}")
        figures = []
        for seed in range(3):  # the first time, activations are allocated and graphs recorded
            prompt = [1000 + (seed * 7919 + i * 104729) % 25000 for i in range(2048)]
            figures.append(served.timed(prompt, 129))
        prefill, decode = figures[-1]
        out["graphs" if graphs else "no_graphs"] = {
            "prefill_2k_tok_s": prefill,
            "decode_at_2k_tok_s": decode,
            "first_prefill_2k_tok_s": figures[0][0],
            "worker_mib_beyond_weights": used() - with_weights,
        }
        worker.stop()
    out["killed_mid_prefill"] = killed_mid_prefill(served, 8192, "--ctx", 10240)
    served.stop()
    out["weights_mib"] = with_weights - before
    return out


def guesses(path):
    """The prediction block on the device: the same tokens with guesses as without, in whatever number they come true."""
    block = path.with_name("small-mtp.gguf")
    synth("small", block, "--part", "mtp")
    served = Served(path, BACKEND, "--model", block)
    names = [m["name"] for m in json.loads(command(BIN / "ds4", "ctl", "--runtime-dir", served.dir, "--json", "models"))["models"]]
    name, mtp = sorted(names, key=lambda n: "mtp" in n.lower())
    worker = served.worker("--model", name)
    want = served.all()
    worker.stop()
    worker = served.worker("--model", name, "--mtp", mtp)
    assert served.all() == want and served.all() == want, "guesses change the answer"
    counts = [l for l in urllib.request.urlopen(served.url + "/metrics").read().decode().splitlines() if "draft" in l and l[0] != "#"]
    worker.stop()
    served.stop()
    assert any(float(l.split()[-1]) > 0 for l in counts), f"nothing was guessed: {counts}"
    return {"prompts_equal": len(want), "counts": counts}


def part_full():
    mount = WORK / "m"
    mount.mkdir()
    command("mount", "-t", "tmpfs", "-o", "size=112G,huge=always", "tmpfs", mount)
    try:
        path = mount / "full.gguf"
        out = synth("full", path)
        say("synthesised", out)
        report["checks"]["full"] = out
        out["by_hand"] = full_by_hand(path)
        say("by hand", json.dumps(out["by_hand"]))
        save()
        for name, args in {
            "throughput_2k": ["throughput", "--ctx", "4096", "--prefill", "2048", "--decode", "128", "--streams", "1,4,16", "--repeats", "2"],
            # Decode behind prompts of 2k and 64k, and prefill of 8k: the depths at which the figures are asked for.
            "throughput_deep": ["throughput", "--ctx", "70000", "--prefill", "2048", "--decode", "128", "--streams", "1", "--repeats", "1",
                                "--at", os.environ.get("DS4_GPU_AT", "2048,8192,65536")],
            "restart": ["restart", "--cycles", os.environ.get("DS4_GPU_CYCLES", "10")],
        }.items():
            out[name] = bench(*args, "--model", path)
            say(name, json.dumps(out[name])[:600])
            save()
        at = out["throughput_deep"]["at"]
        if "65536" in at:
            out["decode_at_64k_over_2k"] = round(at["65536"]["decode_tok_s"] / at["2048"]["decode_tok_s"], 3)
        return out
    finally:
        command("umount", mount)


def save():
    OUT.write_text(json.dumps(report, indent=1) + "\n")


def main():
    if BACKEND == "cuda-vmm":
        gpu = command("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader").strip()
        report["conditions"] = {"gpu": gpu, "cpus": os.cpu_count(), "kernel": platform.release()}
    for part in PARTS:
        begun = time.monotonic()
        try:
            report["checks"][part] = globals()["part_" + part]()
            say(part, "passed")
        except Exception as e:  # every part is tried, and says what was wrong
            report["failed"].append({part: f"{type(e).__name__}: {e}"})
            say(part, "FAILED", e)
        report.setdefault("seconds", {})[part] = round(time.monotonic() - begun, 1)
        save()
    shutil.rmtree(WORK, ignore_errors=True)
    return 1 if report["failed"] else 0


sys.exit(main())
