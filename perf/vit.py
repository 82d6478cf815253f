"""Forward pass of SigLIP-B/16 at 256², batch size 512, bf16: our tower against transformers', both compiled.

    python perf/vit.py --out results.json           # needs a CUDA device

Both map pixels to the pooled vector with the same random weights. Lower bound: the tower's matrix products at the
matrix rate of an H200.
"""

import json
import tempfile

import torch
from record import make_parser, write_record
from timing import H200_MATRIX_RATE, median_seconds, relative_difference

from vitrail.hub import from_hf
from vitrail.nn import cost

BATCH = 512
MEASURED = ("vitrail.encoders.vit", "vitrail.nn.block", "vitrail.nn.attention", "vitrail.nn.mlp")


@torch.no_grad()
def main() -> None:
    from transformers import SiglipVisionConfig, SiglipVisionModel

    arguments = make_parser(__doc__).parse_args()
    torch.manual_seed(0)
    config = SiglipVisionConfig(image_size=256)  # the defaults are B/16
    reference = SiglipVisionModel(config).bfloat16().eval()
    with tempfile.TemporaryDirectory() as folder:
        reference.save_pretrained(folder)
        tower = from_hf(folder, device="cuda")
    reference = reference.cuda()
    pixels = torch.randn(BATCH, 3, 256, 256, device="cuda", dtype=torch.bfloat16)
    result = {
        "difference": relative_difference(
            tower.forward_pooled(pixels).float(), reference(pixels).pooler_output.float()
        ),
        "floor_per_s": BATCH * H200_MATRIX_RATE / cost.count_flops(tower, tower.workload(BATCH)),
    }
    compiled, compiled_reference = torch.compile(tower.forward_pooled), torch.compile(reference)
    for name, call in (
        ("ours", lambda: compiled(pixels)),
        ("transformers", lambda: compiled_reference(pixels)),
        ("ours_eager", lambda: tower.forward_pooled(pixels)),
        ("transformers_eager", lambda: reference(pixels)),
    ):
        result[name] = BATCH / median_seconds(call, 15, warmup=5)
    result["ratio"] = result["ours"] / result["transformers"]
    print(json.dumps(result, indent=1))
    write_record(arguments.out, result, MEASURED)


if __name__ == "__main__":
    main()
