"""tests/gpu/run.sh takes the product to a GPU; without one, what it does to owner, workers and HTTP can be done to the CPU's."""

import json
import os
import subprocess

from conftest import BIN, ROOT


def test_the_script_for_a_card_passes_on_the_cpu(tmp_path):
    env = {k: v for k, v in os.environ.items() if not k.startswith("DS4_")}
    out = tmp_path / "out.json"
    done = subprocess.run(
        [ROOT / "tests/gpu/run.sh", BIN, ROOT / "tests/fixtures", out, "tiny"],
        env=dict(env, DS4_GPU_BACKEND="memfd"),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads(out.read_text())
    assert report["failed"] == []
    for model in ("tiny-v4", "tiny-llama"):
        seen = report["checks"]["tiny"][model]
        assert seen["greedy_tokens_equal_to_cpu"] == [240, 240] and seen["equal_in_a_batch_of"] == 15
        assert 0 < seen["tokens_before_the_kill"] < 900
