"""`python -m experiments.video`: the tables of positions and timestamps of videos."""

from pathlib import Path

from cyclopts import App

from vitrail.cli import main
from vitrail.errors import ConfigError

app = App(
    name="python -m experiments.video",
    help="Positions and timestamps of videos. `vitrail sweep video-time` trains the models.",
    help_epilogue="Example: python -m experiments.video report",
)


@app.command(name="report", help_epilogue="Example: python -m experiments.video report")
def write_video_page(
    *, results: Path = Path("results/video-time.json"), out: Path = Path("docs/vlm-video-results.md")
) -> None:
    """Write the page of all variants from the results, and its chart beside it.

    Parameters
    ----------
    results
        The table of the sweep video-time.
    out
        The page to write.
    """
    from experiments.video.video_page import draw_length_chart, render_video_page
    from vitrail.plots.charts import save_chart

    chart = out.with_suffix(".svg")
    text = render_video_page(results, chart.name)
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{out} cannot be written: {error.strerror}", "give another path with --out") from None
    save_chart(draw_length_chart(results), chart)
    print(out)


@app.command(name="files", help_epilogue="Example: python -m experiments.video files --count 40")
def measure_clip_files(
    *,
    model: Path = Path("results/starts/video-time"),
    count: int = 40,
    crf: tuple[int, ...] = (23, 35, 45),
    seed: int = 1,
    json: Path = Path("results/video-time-files.json"),
) -> None:
    """Ask a trained model about test clips as frames in memory and as mp4 files, and save the scores.

    Parameters
    ----------
    model
        A model that the task video-qa trained.
    count
        Number of clips. Each has five questions.
    crf
        Quality of the H.264 encoder: higher values compress more. May be repeated.
    seed
        Seed of the model's training, for the table.
    json
        The file to write.
    """
    from experiments.video.clip_files import build_files_table, score_clip_files
    from vitrail.cli.output_files import write_json_with_origin
    from vitrail.pipelines import ChatPipeline

    scores = score_clip_files(ChatPipeline.load(model, device="cpu"), count, crf)
    write_json_with_origin(json, {"table": build_files_table(scores, seed)})


if __name__ == "__main__":
    main(app)
