#!/usr/bin/env python3
"""PyTorch's attention beside `slimkv bench decode`: fp16 decode, one token against S cached rows, caches visited in turn.

Usage: torch_decode.py [--device cpu|cuda] [--threads N] [--seqlen 4096,32768] [--warm]
Prints one JSON line a shape. Needs torch; nothing else in the repository does.
"""
import argparse
import json
import statistics
import time

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

p = argparse.ArgumentParser()
p.add_argument("--device", default="cpu")
p.add_argument("--threads", type=int, default=1)
p.add_argument("--seqlen", default="1024,4096,32768")
p.add_argument("--hq", type=int, default=32)
p.add_argument("--hkv", type=int, default=8)
p.add_argument("--dim", type=int, default=128)
p.add_argument("--warm", action="store_true")
p.add_argument("--rounds", type=int, default=21)
a = p.parse_args()
torch.set_num_threads(a.threads)
cuda = a.device.startswith("cuda")


def median_us(call, caches, rounds):
    """Median of single calls on the CPU; on CUDA the mean of a queue of calls between two events, median of the queues."""
    times = []
    if cuda:
        for c in caches:
            call(*c)
        for r in range(rounds):
            start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            torch.cuda.synchronize()
            start.record()
            n = max(20, len(caches))
            for i in range(n):
                call(*caches[i % len(caches)])
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end) * 1e3 / n)
    else:
        for i in range(rounds + 2):
            c = caches[i % len(caches)]
            t = time.perf_counter()
            call(*c)
            times.append((time.perf_counter() - t) * 1e6)
        times = times[2:]
    return statistics.median(times), min(times)


for s in map(int, a.seqlen.split(",")):
    size = 2 * a.hkv * s * a.dim * 2
    need = (512 << 20) if cuda else (1280 << 20)
    count = 1 if a.warm else max(2, -(-need // size))
    q = torch.randn(1, a.hq, 1, a.dim, dtype=torch.float16, device=a.device)
    caches = []
    for _ in range(count):
        k = torch.empty(1, a.hkv, s, a.dim, dtype=torch.float16, device=a.device).uniform_(-1, 1)
        v = torch.empty(1, a.hkv, s, a.dim, dtype=torch.float16, device=a.device).uniform_(-1, 1)
        caches.append((k, v))
    backends = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION} if cuda else {"cpu": None}
    for name, backend in backends.items():
        # On the CPU the heads of a group are passed as queries of one KV head: the same result, and PyTorch's fastest way.
        grouped = q.view(1, a.hkv, a.hq // a.hkv, a.dim)

        def call(k, v):
            if cuda:
                return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
            return F.scaled_dot_product_attention(grouped, k, v)
        if backend is None:
            median, best = median_us(call, caches, a.rounds)
        else:
            with sdpa_kernel(backend):
                median, best = median_us(call, caches, a.rounds)
        print(json.dumps({"peer": f"torch {torch.__version__} {name}", "device": a.device, "threads": a.threads, "s": s,
                          "cold": not a.warm, "median_us": round(median, 1), "min_us": round(best, 1),
                          "gb_per_s": round(size / median / 1e3, 1)}), flush=True)
