"""`vitrail serve`: a server of OpenAI's API for one or several models."""

import os

from vitrail.cli.config_options import DeviceOption
from vitrail.errors import ConfigError

KEY_VARIABLE = "VITRAIL_API_KEY"
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def serve_models(
    *models: str,
    host: str = "127.0.0.1",
    port: int = 8000,
    api_key: list[str] | None = None,
    lora: list[str] | None = None,
    max_num_seqs: int = 64,
    max_batched_tokens: int = 2048,
    kv_cache_gib: float | None = None,
    max_waiting: int = 256,
    drain_seconds: float = 30.0,
    allow_remote_images: bool = False,
    device: DeviceOption = None,
) -> None:
    """Serve models with OpenAI's API: chat, completions, embeddings and images.

    Example: vitrail serve mini-vlm

    Example: vitrail serve Qwen/Qwen3-VL-2B-Instruct openai/clip-vit-base-patch16 --port 8080

    Ctrl-C or SIGTERM stops the server after the running requests.

    Parameters
    ----------
    models
        Models to serve: mini, mini-vlm, folders or hub ids.
    host
        Address to listen on. Any other than localhost needs a key.
    port
        Port to listen on. 0 chooses a free one.
    api_key
        A key that clients send; repeat it for several. Default: the environment variable VITRAIL_API_KEY, or none.
    lora
        A LoRA adapter of the first model as NAME=FOLDER, a folder of PEFT; repeat it for several. Requests select it
        by its name as the model.
    max_num_seqs
        Sequences that run at the same time.
    max_batched_tokens
        Tokens of one pass. More are faster for long prompts and delay the answers that run.
    kv_cache_gib
        Size of the KV cache of each model in GiB. Default: half of the free memory of the GPU, at most 1 on a CPU.
    max_waiting
        Requests that wait at most. More get status 429.
    drain_seconds
        Time that running requests have to end when the server stops.
    allow_remote_images
        Read images at http and https addresses of the public internet. Otherwise images are data URLs.
    """
    try:
        import starlette  # noqa: F401
        import uvicorn  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            f"`vitrail serve` needs {error.name}, which is not installed", "pip install 'vitrail[serve]'"
        ) from None
    from vitrail.serve.server_process import run_server

    if not models:
        raise ConfigError("no model is given", "name one: vitrail serve mini-vlm")
    keys = list(api_key or filter(None, [os.environ.get(KEY_VARIABLE)]))
    if host not in LOCAL_HOSTS and not keys:
        raise ConfigError(f"host {host} is reachable from other machines, and there is no key", "give --api-key")
    adapters: dict[str, str] = {}
    for given in lora or ():
        name, _, folder = given.partition("=")
        if not name or not folder or name in adapters:
            raise ConfigError(f"--lora {given} is not NAME=FOLDER with a new name", "give --lora pirate=out/pirate")
        adapters[name] = folder
    run_server(
        models,
        host=host,
        port=port,
        api_keys=keys,
        device=device,
        adapters=adapters,
        drain_seconds=drain_seconds,
        allow_remote_images=allow_remote_images,
        max_num_seqs=max_num_seqs,
        max_batched_tokens=max_batched_tokens,
        max_waiting=max_waiting,
        kv_cache_bytes=None if kv_cache_gib is None else int(kv_cache_gib * 2**30),
    )
