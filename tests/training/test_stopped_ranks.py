"""A rank that stops or holds up the others is named, with its step. Gradients are reduced in float32."""

import inspect
import os
import signal
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp._fully_shard import _fsdp_param_group as param_group

from training import ranks
from training.test_trainer import stage, trainer
from vitrail.errors import ConfigError, TrainError
from vitrail.training import distributed, rank_monitor

pytestmark = pytest.mark.slow


def stop_in_step_4(folder: Path, how: str) -> None:
    """Rank 1 ends, stops or sleeps in step 4; the other must name it."""
    os.environ[rank_monitor.SECONDS_VARIABLE] = "30"  # more than any step takes on a busy machine
    run = trainer(folder, stage(save_every=2))
    plain = run.loader.order.__class__.__getitem__

    if distributed.get_rank() == 1:

        def read(self, index):
            if index >= 3 * 4:
                if how == "sleeps":
                    time.sleep(ranks.TIMEOUT)
                os.kill(os.getpid(), signal.SIGKILL if how == "ends" else signal.SIGSTOP)
            return plain(self, index)

        run.loader.order.__class__.__getitem__ = read
    try:
        run.train()
    except TrainError as error:
        (folder / f"rank-{distributed.get_rank()}").write_text(str(error))
        os._exit(7)


@pytest.mark.parametrize("how", ["ends", "stops", "sleeps"])
def test_stopped_rank_is_named_with_its_step(tmp_path, how):
    processes = ranks.spawn(2, stop_in_step_4, tmp_path, how)
    processes[0].join(ranks.TIMEOUT)
    assert processes[0].exitcode == 7
    for process in processes:
        process.kill()
        process.join()
    message = (tmp_path / "rank-0").read_text()
    place = "ended, or is stopped, in step 4; it was last seen"
    if how == "sleeps":
        place = "holds up the others in step 4, loading data (process"
    assert f"rank 1 {place}" in message, message
    assert "start the same command again to resume" in message


def test_seconds_are_checked(monkeypatch):
    for text in ("0", "-3", "soon", "nan"):
        monkeypatch.setenv(rank_monitor.SECONDS_VARIABLE, text)
        with pytest.raises(ConfigError, match=f"{rank_monitor.SECONDS_VARIABLE} is '{text}'"):
            rank_monitor.get_rank_seconds()


def test_flight_recorder_is_on(monkeypatch, tmp_path):
    for name in ("TORCH_FR_BUFFER_SIZE", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE"):
        monkeypatch.delenv(name, raising=False)
    rank_monitor.enable_flight_recorder(tmp_path)
    assert int(os.environ["TORCH_FR_BUFFER_SIZE"]) > 0 and os.environ["TORCH_NCCL_DUMP_ON_TIMEOUT"] == "1"
    assert os.environ["TORCH_NCCL_DEBUG_INFO_TEMP_FILE"].startswith(str(tmp_path))


def record_reductions(folder: Path) -> None:
    """Check the dtype in which FSDP reduces gradients."""
    dtypes, plain = set(), param_group.foreach_reduce

    def reduce(*given, **more):
        dtypes.add(inspect.signature(plain).bind(*given, **more).arguments["reduce_dtype"])
        return plain(*given, **more)

    param_group.foreach_reduce = reduce
    run = trainer(folder, stage(steps=2, dtype="bfloat16"))
    run.train()
    assert all(p.dtype == torch.bfloat16 for p in run.module.parameters())
    assert dtypes == {torch.float32}, dtypes


def test_gradients_of_half_precision_weights_are_reduced_in_float32(tmp_path):
    ranks.run(2, record_reductions, tmp_path)
