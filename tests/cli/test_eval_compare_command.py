"""`vitrail eval compare pope FIRST SECOND --data FILE`: the difference, part by part, and what cannot be compared."""

import json

import pytest

from data.formats.conftest import MAKERS
from vitrail.cli.eval_command import app
from vitrail.errors import VitrailError
from vitrail.evals.suites.benchmarks import get_benchmark
from vitrail.evals.suites.generation import generate_answers


class Toy:
    def __init__(self, message):
        self.message = message

    def ask(self, pictures, question, **how):
        return self.message(question)


def keep(path, name, samples, model, message, prompt=None, **how):
    row = get_benchmark(name)
    generate_answers(
        Toy(message),
        samples,
        lambda sample: row.build_question(sample, prompt),
        answers_file=path,
        model_name=model,
        **how,
    )
    generate_answers(
        Toy(lambda _: "blind"), samples, row.build_question, blind=True, answers_file=path, model_name=model
    )
    return path


@pytest.fixture
def pope(tmp_path):
    made = MAKERS["pope"][1](tmp_path)
    where = ("--data", made.path, "--image-folder", made.options["image_folder"])
    return get_benchmark("pope").load_samples(made.path, **made.options), where


def run(*words) -> None:
    app(["compare", *map(str, words)], result_action="return_value")


def test_pope(pope, tmp_path, capsys):
    samples, where = pope
    a = keep(tmp_path / "a.jsonl", "pope", samples, "knows", lambda text: "no" if "dog" in text else "yes")
    b = keep(tmp_path / "b.jsonl", "pope", samples, "nods", lambda text: "yes", prompt="{question} Say it.")
    out = tmp_path / "found.json"
    run("pope", a, b, *where, "--out", out)
    result = capsys.readouterr().out.splitlines()
    assert result[0].startswith("first: knows (") and result[2].split()[:4] == ["all", "100.0%", "50.0%", "+50.0%"]
    found = json.loads(out.read_text())
    splits = {"split random", "split popular", "split adversarial"}
    assert {part["name"] for part in found["subsets"]} == {"all", *splits}
    assert found["models"] == ["knows", "nods"] and found["subsets"][0]["difference"] == 0.5
    run("pope", b, a, *where, "--mode", "lmms-eval")
    assert "-50.0%" in capsys.readouterr().out


def test_binary_scores_have_mcnemar_p(tmp_path, capsys):
    made = MAKERS["vqa"][1](tmp_path)
    samples = get_benchmark("vqav2").load_samples(made.path, **made.options)
    a = keep(tmp_path / "a.jsonl", "vqav2", samples, "one", lambda _: "card")
    keep(a, "vqav2", samples, "other", lambda text: "card" if "in 1" in text else "dog")
    where = [word for key, value in made.options.items() for word in (f"--{key.replace('_', '-')}", value)]
    run("vqav2", a, a, "--data", made.path, *where, "--models", "one", "other")
    assert "only the first right 2, only the second 0, p = 0.5" in capsys.readouterr().out
    with pytest.raises(VitrailError, match="answers of one, other"):
        run("vqav2", a, a, "--data", made.path, *where)
    with pytest.raises(VitrailError, match="no answers of 'two'"):
        run("vqav2", a, a, "--data", made.path, *where, "--models", "one", "two")


def test_incomparable_answers_are_refused(pope, tmp_path):
    samples, where = pope
    whole = keep(tmp_path / "a.jsonl", "pope", samples, "m", lambda _: "yes")
    half = keep(tmp_path / "b.jsonl", "pope", samples.select([0, 1]), "m", lambda _: "yes")
    with pytest.raises(VitrailError, match=r"b\.jsonl answers 2 of the 6 samples"):
        run("pope", whole, half, *where)
    twice = keep(tmp_path / "c.jsonl", "pope", samples, "m", lambda _: "yes")
    keep(twice, "pope", samples, "m", lambda _: "yes", max_new_tokens=3)
    with pytest.raises(VitrailError, match="two answers of m"):
        run("pope", whole, twice, *where)
    made = MAKERS["vqa"][1](tmp_path / "other")
    other = get_benchmark("vqav2").load_samples(made.path, **made.options)
    alien = keep(tmp_path / "d.jsonl", "vqav2", other, "m", lambda _: "yes")
    with pytest.raises(VitrailError, match="answers none of the 6 samples"):
        run("pope", whole, alien, *where)
    swapped = tmp_path / "e.jsonl"
    swapped.write_text(whole.read_text().replace("card in the", "tree in the"))  # the same ids and pictures
    with pytest.raises(VitrailError, match=r"e\.jsonl answers"):
        run("pope", whole, swapped, *where)
    with pytest.raises(VitrailError, match="does not exist"):
        run("pope", whole, tmp_path / "none.jsonl", *where)
    with pytest.raises(VitrailError, match="did you mean 'pope'"):
        run("popes", whole, whole, *where)
