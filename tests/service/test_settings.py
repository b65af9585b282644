"""Sources of settings, refused values, and printed values."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, SecretStr, ValidationError

from service.config.settings import Settings, changed_settings, redacted, settings_fields
from service.config.sources import SettingsError, load_settings, variable_name
from tests.service.command_line import parsed_flags


def refusal(
    *,
    flags: dict[str, dict[str, str]] | None = None,
    environ: dict[str, str] | None = None,
    file: Path | None = None,
) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(flags=flags, environ=environ or {}, file=file)
    return str(caught.value)


def written(tmp_path: Path, text: str) -> Path:
    file = tmp_path / "coppice.yaml"
    file.write_text(text, encoding="utf-8")
    return file


def test_without_sources_every_value_is_the_default() -> None:
    assert load_settings(environ={}) == Settings()


def test_flags_override_environment_which_overrides_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "server: {port: 1, drain_seconds: 1}\nengine: {block_size: 16}\n")
    settings = load_settings(
        flags={"server": {"port": "3"}},
        environ={"COPPICE_SERVER__PORT": "2", "COPPICE_SERVER__DRAIN_SECONDS": "2"},
        file=file,
    )
    assert settings.server.port == 3
    assert settings.server.drain_seconds == 2
    assert settings.engine.block_size == 16


def test_every_field_has_an_environment_variable() -> None:
    environ = {}
    for section, name, field in settings_fields():
        value = field.get_default(call_default_factory=True, validated_data={})
        text = (
            "none" if value is None else ":".join(value) if isinstance(value, tuple) else str(value)
        )
        environ[variable_name(section, name)] = text
    assert load_settings(environ=environ) == Settings()


def test_none_clears_a_value_of_a_lower_source(tmp_path: Path) -> None:
    file = written(tmp_path, "engine: {cache_bytes: 2000000}\n")
    flags = parsed_flags("--engine.cache-bytes", "none")
    assert load_settings(flags=flags, file=file, environ={}) == Settings()
    variable = {"COPPICE_ENGINE__CACHE_BYTES": "none"}
    assert load_settings(environ=variable, file=file) == Settings()


def test_source_directories_are_separated_by_colons() -> None:
    settings = load_settings(environ={"COPPICE_WEIGHTS__SOURCE_DIRECTORIES": "/a:/b"})
    assert settings.weights.source_directories == (Path("/a"), Path("/b"))


def test_source_directories_may_be_a_list_in_the_file(tmp_path: Path) -> None:
    file = written(tmp_path, "weights:\n  source_directories: [/a, /b]\n")
    settings = load_settings(environ={}, file=file)
    assert settings.weights.source_directories == (Path("/a"), Path("/b"))


def test_empty_file_and_empty_section_change_nothing(tmp_path: Path) -> None:
    assert load_settings(environ={}, file=written(tmp_path, "")) == Settings()
    assert load_settings(environ={}, file=written(tmp_path, "engine:\n")) == Settings()


def test_unknown_variable_is_refused_with_the_nearest_name() -> None:
    assert refusal(environ={"COPPICE_ENGINE__BLOK_SIZE": "32"}) == (
        "engine.blok_size: there is no such setting; did you mean engine.block_size? "
        "(from COPPICE_ENGINE__BLOK_SIZE)"
    )


def test_unknown_section_is_refused() -> None:
    assert "there is no such setting (from COPPICE_NOPE__X)" in refusal(
        environ={"COPPICE_NOPE__X": "1"}
    )


def test_kubernetes_service_variables_are_ignored() -> None:
    environ = {"COPPICE_PORT": "tcp://10.0.0.1:8000", "COPPICE_SERVICE_HOST": "10.0.0.1"}
    assert load_settings(environ=environ) == Settings()


def test_unknown_keys_of_the_file_are_refused(tmp_path: Path) -> None:
    file = written(tmp_path, "server: {prot: 1}\nextra: {}\n")
    text = refusal(file=file)
    assert f"server.prot: there is no such setting; did you mean server.port? (from {file})" in text
    assert f"extra: there is no such setting (from {file})" in text


def test_invalid_value_reports_its_source() -> None:
    text = refusal(
        flags={"engine": {"block_size": "33"}}, environ={"COPPICE_ENGINE__BLOCK_SIZE": "32"}
    )
    assert text == "engine.block_size: Input should be a multiple of 16 (from --engine.block-size)"


def test_invalid_value_is_not_repeated() -> None:
    assert "hunter2" not in refusal(environ={"COPPICE_SERVER__PORT": "hunter2"})


def test_error_of_a_section_is_not_attributed_to_a_field() -> None:
    text = refusal(flags={"server": {"port": "1"}}, environ={"COPPICE_SERVER__HOST": "0.0.0.0"})
    assert "from" not in text.replace("reached from", "")


@pytest.mark.parametrize("text", ["[1]", "just words", "server: [1]", "a: b: c", "server: 5"])
def test_file_that_is_not_a_mapping_is_refused(tmp_path: Path, text: str) -> None:
    assert "coppice.yaml" in refusal(file=written(tmp_path, text))


def test_syntax_error_reports_the_line_without_quoting_it(tmp_path: Path) -> None:
    text = refusal(file=written(tmp_path, "server:\n  key: [hunter2\n"))
    assert "line 3" in text
    assert "hunter2" not in text


def test_missing_file_is_refused(tmp_path: Path) -> None:
    assert refusal(file=tmp_path / "none.yaml").endswith("none.yaml: No such file or directory")


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "10.0.0.7", "gpu-node"])
def test_open_address_needs_an_explicit_setting(host: str) -> None:
    assert "set server.allow_open to true" in refusal(flags={"server": {"host": host}})
    settings = load_settings(flags={"server": {"host": host, "allow_open": "true"}}, environ={})
    assert settings.server.host == host


@pytest.mark.parametrize("host", ["127.0.0.1", "127.9.9.9", "::1", "localhost"])
def test_loopback_needs_no_setting(host: str) -> None:
    assert load_settings(flags={"server": {"host": host}}, environ={}).server.host == host


def test_uploads_are_staged_in_the_cache_of_the_user(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/var/cache")
    assert Settings().weights.directory == Path("/var/cache/coppice/weights")
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert Settings().weights.directory == Path.home() / ".cache/coppice/weights"


def test_settings_are_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        setattr(Settings().server, "port", 1)  # noqa: B010


def test_every_field_has_a_description() -> None:
    bare = [
        f"{section}.{name}" for section, name, field in settings_fields() if not field.description
    ]
    assert bare == []


def test_names_end_in_their_unit() -> None:
    for section, name, field in settings_fields():
        unit = re.search(
            r"^(seconds|bytes)\b|\bin (seconds|bytes)\b(?! per)", field.description or ""
        )
        assert unit is None or name.endswith(f"_{unit[1] or unit[2]}"), f"{section}.{name}"


def test_secrets_are_masked() -> None:
    class Keys(BaseModel):
        key: SecretStr = SecretStr("hunter2")

    assert redacted(Keys()) == {"key": "**********"}


def test_start_logs_only_settings_that_differ_from_their_defaults() -> None:
    assert changed_settings(Settings()) == {}
    changed = Settings.model_validate({"engine": {"max_sequences": 8}})
    assert changed_settings(changed) == {"engine": {"max_sequences": 8}}


@pytest.mark.parametrize("text", ["off", "'off'", "auto", "always"])
def test_off_is_a_mode_although_yaml_parses_it_as_false(tmp_path: Path, text: str) -> None:
    file = written(tmp_path, f"attention:\n  shared_prefix: {text}\n")
    assert load_settings(file=file, environ={}).attention.shared_prefix == text.strip("'")


def test_vllm_arguments_may_be_text_and_come_from_the_first_source(tmp_path: Path) -> None:
    file = written(tmp_path, "engine:\n  vllm_args: {a: 1, b: [2]}\n")
    variable = {"COPPICE_ENGINE__VLLM_ARGS": "{d: 4, b: 5}"}
    assert load_settings(environ={}, file=file).engine.vllm_args == {"a": 1, "b": [2]}
    assert load_settings(environ=variable, file=file).engine.vllm_args == {"d": 4, "b": 5}


def test_none_clears_the_vllm_arguments_of_lower_sources(tmp_path: Path) -> None:
    file = written(tmp_path, "engine: {vllm_args: {a: 1}}\n")
    flags = parsed_flags("--engine.vllm-args", "none")
    assert load_settings(flags=flags, environ={}, file=file).engine.vllm_args == {}


@pytest.mark.parametrize("text", ["words", "[1]", "{a", "{1: 2}"])
def test_vllm_arguments_that_are_no_mapping_are_refused(text: str) -> None:
    lines = refusal(flags={"engine": {"vllm_args": text}})
    assert lines.startswith("engine.vllm_args") and "\n" not in lines
    assert lines.endswith("(from --engine.vllm-args)")


def test_vllm_argument_with_the_name_of_a_setting_is_that_setting() -> None:
    settings = load_settings(
        flags={"engine": {"vllm_args": "{quantization: fp8, block_size: 64}"}}, environ={}
    )
    assert (settings.engine.quantization, settings.engine.block_size) == ("fp8", 64)
    assert settings.engine.vllm_args == {}


def test_setting_given_under_both_names_is_refused() -> None:
    text = refusal(flags={"engine": {"vllm_args": "{dtype: auto}", "dtype": "auto"}})
    assert text == "engine: dtype and vllm_args.dtype are both set; set one of them"
