"""This project's EngineCore and output processor in one process, for `micro`."""

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.host_path.limits import CONTEXT_TOKENS, our_settings
from bench.harness.host_path.micro_cases import MicroCase
from engine.feature_base import StartSettings
from engine.features import Features
from engine.launch import plugin
from engine.launch.arguments import USAGE_CONTEXT, engine_arguments
from engine.launch.environment import engine_environment
from engine.requests.request_params import sampling_params
from engine.requests.request_submission import Generation
from engine.sampling import support_hooks
from engine.settings import EngineSettings
from engine.types.samples import SampleRequest, Sampling


@contextmanager
def our_config(model: Path) -> Iterator[Any]:
    """vLLM's configuration of our engine, after the hooks of EngineCore and of the service."""
    settings = EngineSettings(**our_settings(model), prompt_kv=False)
    features = Features(StartSettings(engine=settings))
    features.check()
    arguments = engine_arguments(settings, model, features, on_cpu=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        engine_environment(
            settings, of_features=features.environment(), on_cpu=True, temp_dir=Path(folder)
        ),
    ):
        plugin.install()
        support_hooks.install_in_service()
        Generation(None, None, num_engines=1)  # type: ignore[arg-type]  # installs its hooks only
        config = arguments.create_engine_config(USAGE_CONTEXT)
        assert features.accept(config), "no feature changes the settings"
        yield config


def our_params(case: MicroCase, name: str, prompt: list[int]) -> Any:
    return sampling_params(
        SampleRequest(
            id=name,
            prompt_token_ids=prompt,
            sampling=Sampling(max_tokens=case.max_tokens, ignore_eos=True),
            num_top_logprobs=case.logprobs or 0,
            returns_logprobs=case.logprobs is not None,
            support=case.has_support,
            on_tokens=_ignore if case.is_streamed else None,
        ),
        CONTEXT_TOKENS,
    )


def _ignore(*_: Any) -> None:
    pass
