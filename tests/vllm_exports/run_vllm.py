"""Generate greedily with vLLM from one exported folder. Runs in vLLM's own environment, without Vitrail.

    python run_vllm.py REQUEST.json ANSWER.json

The request holds the folder, the prompts (ids with one placeholder for each image, and image files) and the number of
tokens. The answer holds the expanded prompt ids and the generated ids of each prompt.
"""

import json
import os
import sys
from pathlib import Path

os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}


def main(request_file: str, answer_file: str) -> None:
    from PIL import Image
    from vllm import LLM, SamplingParams

    request = json.loads(Path(request_file).read_text())
    most_images = max(len(prompt["images"]) for prompt in request["prompts"])
    images = {"limit_mm_per_prompt": {"image": most_images, "video": 0}} if most_images else {}
    llm = LLM(
        model=request["folder"],
        dtype="float32",
        max_model_len=request["max_length"],
        max_num_seqs=4,
        enforce_eager=True,
        seed=0,
        disable_log_stats=True,
        enable_prefix_caching=False,
        **images,
    )
    sampling = SamplingParams(temperature=0.0, max_tokens=request["max_new_tokens"], ignore_eos=True, detokenize=False)
    prompts = []
    for prompt in request["prompts"]:
        loaded = [Image.open(file).convert("RGB") for file in prompt["images"]]
        media = {"multi_modal_data": {"image": loaded}} if loaded else {}
        prompts.append({"prompt_token_ids": prompt["ids"], **media})
    outputs = llm.generate(prompts, sampling, use_tqdm=False)
    answers = [
        {"prompt_ids": list(output.prompt_token_ids), "ids": list(output.outputs[0].token_ids)} for output in outputs
    ]
    Path(answer_file).write_text(json.dumps(answers))


if __name__ == "__main__":
    main(*sys.argv[1:])
