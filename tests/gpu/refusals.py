"""Allocations that are refused: a worker's one at a time, and a load's. For tests/gpu/run.sh."""

import http.client
import os
import signal
import threading
import time

from harness import BACKEND, FIXTURES, PROMPTS, Served, report, say, used


def part_memory():
    """Allocations of a worker are refused one at a time (DS4_CUDA_REFUSE): the worker says so and ends, or answers that request with
    503 and the next as ever. All of them, every 16th first, as far as DS4_GPU_MEMORY_S seconds (60) go; DS4_GPU_MEMORY=1-40,55 takes a part of
    them, and the loads' only with the first. DS4_GPU_LANES workers (8) at once."""
    model = FIXTURES / "deepseek_v4/tiny-v4.gguf"
    end = time.monotonic() + float(os.environ.get("DS4_GPU_MEMORY_S", "60"))
    wanted = set()
    for part in os.environ.get("DS4_GPU_MEMORY", "1-2000").split(","):
        first, _, last = part.partition("-")
        wanted.update(range(int(first), int(last or first) + 1))
    before = used()
    served = Served(model, BACKEND)
    worker = served.worker("--max-batch", 2)
    want = [served.complete(p, 8) for p in PROMPTS]
    worker.stop()
    served.stop()
    seen, lock = {}, threading.Lock()
    most = [max(wanted) + 1]  # there are fewer allocations than this
    numbers = iter([n for start in (16, 8, 12, 4, *range(1, 16)) for n in range(start, most[0], 16) if n in wanted])

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
    loads = loads_refused(model) if BACKEND == "cuda-vmm" and 1 in wanted else {}
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
        "not_tried": sorted(n for n in wanted if n < most[0] and n not in seen),
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
