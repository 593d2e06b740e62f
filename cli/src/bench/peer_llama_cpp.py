"""Runs llama.cpp's own HTTP server (wheel xllamacpp) on a loopback port for `ds4 bench peer`.

Arguments: MODEL.gguf THREADS CONTEXT. Prints one JSON line {"url", "version", "system"} once it serves, then waits for its
standard input to close, so that it ends with the benchmark however that ends.
"""

import importlib.metadata
import json
import sys

import xllamacpp

model, threads, context = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
params = xllamacpp.CommonParams()
params.model.path = model
params.hostnames = ["127.0.0.1"]
params.port = 0
params.n_ctx = context
params.n_parallel = 1
params.n_gpu_layers = 0
params.cpuparams.n_threads = threads
params.cpuparams_batch.n_threads = threads
params.cache_prompt = False
params.cache_ram_mib = 0
params.ui = False
params.verbosity = 0
server = xllamacpp.Server(params)
print(
    json.dumps(
        {
            "url": server.listening_address,
            "version": importlib.metadata.version("xllamacpp"),
            "system": xllamacpp.get_system_info(),
        }
    ),
    flush=True,
)
sys.stdin.read()
