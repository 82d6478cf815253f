"""SigLIP-B/16 at 256², batch 512, bf16, forward: our tower against transformers', both compiled, in one run.

    python perf/vit.py --out results.json           # needs a CUDA device

Both go from pixels to the pooled vector with the same random weights. Floor: the tower's matrix operations at 790
TFLOP/s.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from record import record

from vitrail.hub import from_hf
from vitrail.nn import cost

BATCH, RATE = 512, 790e12


def rate(call: Callable[[], object]) -> float:
    """Pictures a second, by the median of 15."""
    times = []
    for i in range(20):
        torch.cuda.synchronize()
        start = time.perf_counter()
        call()
        torch.cuda.synchronize()
        if i >= 5:
            times.append(time.perf_counter() - start)
    return BATCH / statistics.median(times)


@torch.no_grad()
def main() -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    torch.manual_seed(0)
    config = SiglipVisionConfig(image_size=256)  # the defaults are B/16
    theirs = SiglipVisionModel(config).bfloat16().eval()
    with tempfile.TemporaryDirectory() as folder:
        theirs.save_pretrained(folder)
        ours = from_hf(folder, device="cuda")
    theirs = theirs.cuda()
    pixels = torch.randn(BATCH, 3, 256, 256, device="cuda", dtype=torch.bfloat16)
    reference, mine = theirs(pixels).pooler_output.float(), ours.pool(pixels).float()
    result = {
        "difference": ((mine - reference).abs().max() / reference.abs().max()).item(),
        "floor_per_s": BATCH * RATE / cost.flops(ours, ours.work(BATCH)),
    }
    compiled, peer = torch.compile(ours.pool), torch.compile(theirs)
    for name, call in (
        ("ours", lambda: compiled(pixels)),
        ("transformers", lambda: peer(pixels)),
        ("ours_eager", lambda: ours.pool(pixels)),
        ("transformers_eager", lambda: theirs(pixels)),
    ):
        result[name] = rate(call)
    result["ratio"] = result["ours"] / result["transformers"]
    print(json.dumps(result, indent=1))
    record(arguments.out, result, "vitrail.encoders.vit", "vitrail.nn.block", "vitrail.nn.attention", "vitrail.nn.mlp")


if __name__ == "__main__":
    main()
