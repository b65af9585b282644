"""Settings section `limits`: maximum sizes of requests, connections, running work and leases."""

from typing import Annotated

from pydantic import Field

from engine.settings.base import Bytes, PositiveInt, Seconds, Section

AtLeast1024 = Annotated[int, Field(ge=1024)]


class LimitsSettings(Section):
    """Limits of requests, connections and running work."""

    max_body_bytes: AtLeast1024 = Field(
        32 * 2**20,
        description="maximum size of a packed request body, and of an offered rollout or session, "
        "in bytes; increase it for requests with many long prompts",
    )
    max_json_bytes: AtLeast1024 = Field(
        8 * 2**20,
        description="maximum size of the JSON in a request, in bytes; larger rollouts and scores "
        "are sent packed; increase it for requests with long texts",
    )
    max_support_bytes: Bytes = Field(
        2**32,
        description="maximum memory of the supports (`return_support`) of all running requests, "
        "in bytes, for the widest sets that their sampling parameters allow; increase it for long "
        "responses without top_k from a large vocabulary",
    )
    keep_answers_seconds: Seconds = Field(
        600.0,
        description="time for which the result of a finished rollout can be fetched, in seconds; "
        "increase it for trainers that poll rarely",
    )
    keep_answers_bytes: Bytes = Field(
        2**30,
        description="maximum memory for results of finished rollouts, in bytes; increase it if "
        "results are dropped before they are fetched",
    )
    max_samples_per_key: PositiveInt | None = Field(
        None,
        description="maximum number of running samples per API key; none: no limit; set it if "
        "several callers share the server",
    )
    max_prompt_tokens_per_key: PositiveInt | None = Field(
        None,
        description="maximum number of running prompt tokens per API key; none: no limit; set it "
        "if several callers share the server",
    )
    max_samples_running: PositiveInt = Field(
        131_072,
        description="maximum number of samples that run or wait; further requests are refused "
        "with 503 and Retry-After; reduce it to refuse work earlier",
    )
    max_lease_seconds: Seconds = Field(
        3600.0,
        description="maximum lease of an open rollout tree, a pause and a sleep, in seconds; "
        "longer leases in requests are shortened to it; increase it if callers cannot renew a "
        "longer one",
    )
    read_seconds: Seconds = Field(
        30.0,
        description="timeout for receiving the headers, or 16 KiB of the body, of a request, in "
        "seconds; increase it for clients on slow networks",
    )
    write_seconds: Seconds = Field(
        60.0,
        description="timeout for a client to receive 256 KiB of a response, in seconds; increase "
        "it for clients on slow networks",
    )
    max_connections: PositiveInt = Field(
        16384,
        description="maximum number of open connections per port; less if the limit of open files "
        "is lower; increase it if connections are refused",
    )
    keep_alive_seconds: PositiveInt = Field(
        75,
        description="time that an idle connection is kept open, in seconds; increase it above the "
        "idle timeout of a proxy in front of the server",
    )
