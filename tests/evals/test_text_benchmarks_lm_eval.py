"""Comparison with EleutherAI's lm-evaluation-harness, if installed: `pip install lm-eval accelerate`.

`harness` recorded the values of `text_recorded.py` with version 0.4.13.
"""

from pathlib import Path
from typing import Any

import pytest

from evals.test_text_benchmarks import ours
from evals.text_recorded import BARE, HARNESS_BARE
from evals.text_rows import HUB, KINDS, llama

TASKS = {
    "arc": "arc/arc_easy.yaml",
    "hellaswag": "hellaswag/hellaswag.yaml",
    "piqa": "piqa/piqa.yaml",
    "siqa": "siqa/siqa.yaml",
    "winogrande": "winogrande/default.yaml",
}


def theirs(root: Path, kind: str) -> Any:
    from lm_eval.models.huggingface import HFLM

    llama(root / "llama", kind)
    return HFLM(pretrained=str(root / "llama"), device="cpu", dtype="float32", batch_size=4)


def lm_eval_harness(root: Path, kind: str) -> dict[str, tuple[dict[str, float], list[list[float]]]]:
    """Scores and log-likelihoods of all options, per benchmark."""
    import datasets
    import lm_eval
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.tasks._yaml_loader import load_yaml

    model, found = theirs(root, kind), {}
    for name, file in TASKS.items():
        data = str(root / f"{name}.parquet")
        datasets.Dataset.from_list(HUB[name]).to_parquet(data)
        config = load_yaml(Path(lm_eval.__file__).parent / "tasks" / file)
        config |= {"dataset_path": "parquet", "dataset_name": None}
        config |= {"dataset_kwargs": {"data_files": dict.fromkeys(("train", "validation", "test"), data)}}
        task = ConfigurableTask(config=config)
        result = lm_eval.evaluate(model, {config["task"]: task}, bootstrap_iters=0, log_samples=True)
        names = {"acc", "acc_norm"} & {key.partition(",")[0] for key in result["results"][config["task"]]}
        scores = {key: result["results"][config["task"]][f"{key},none"] for key in sorted(names)}
        rows = sorted(result["samples"][config["task"]], key=lambda sample: sample["doc_id"])
        found[name] = scores, [[round(option[0][0], 4) for option in row["resps"]] for row in rows]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_matches_lm_eval(tmp_path, kind):
    pytest.importorskip("lm_eval")
    for name, (scores, weights) in lm_eval_harness(tmp_path, kind).items():
        found, own = ours(tmp_path, kind, name)
        assert found == pytest.approx(scores)
        for row, other in zip(own, weights, strict=True):
            assert row == pytest.approx(other, abs=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_matches_lm_eval_without_special_tokens(tmp_path, kind):
    pytest.importorskip("lm_eval")
    from lm_eval.api.instance import Instance

    asked = [Instance("loglikelihood", {}, text, n) for n, text in enumerate(BARE)]
    found = [value for value, _ in theirs(tmp_path, kind).loglikelihood(asked, disable_tqdm=True)]
    assert found == pytest.approx(HARNESS_BARE[kind], abs=2e-3)
