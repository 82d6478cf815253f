"""`python -m experiments.token_scaling`: the token-scaling experiment."""

from cyclopts import App

from vitrail.cli import main

app = App(
    name="python -m experiments.token_scaling",
    help="Train or evaluate models with few and many visual tokens, and fit the scaling law of each kind of question.",
)
app.command(
    "experiments.token_scaling.run_command:run_experiment",
    name="run",
    help="Train models with few and many visual tokens, with and without the question, and fit the law of each kind."
    "\n\nThe protocol of the token-scaling paper with small models: one base model, then runs with a frozen language "
    "model, all tested on the same questions.",
    help_epilogue="Example: python -m experiments.token_scaling run --out out/scaling --jobs 5",
)
app.command(
    "experiments.token_scaling.reduce_command:evaluate_fewer_tokens",
    name="reduce",
    help="Evaluate a trained model with few and many image tokens, and fit the law of each kind of question.\n\n"
    "Nothing is trained: tokens are pruned, merged, averaged or dropped at random at inference.",
    help_epilogue="Example: python -m experiments.token_scaling reduce mini --preset few --things hundred "
    "--vendors twemoji --out out/fewer",
)

if __name__ == "__main__":
    main(app)
