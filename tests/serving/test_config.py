"""Settings: one declaration, four sources, one precedence, and errors that name what is wrong."""

from __future__ import annotations

import dataclasses
import pathlib
from typing import Any

import pytest

from sparsejax import build, cli, config
from sparsejax.config import EngineConfig, ServerConfig
from sparsejax.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Knobs:
    window_tokens: int = dataclasses.field(default=64, metadata={"help": "rows kept", "unit": "tokens"})
    seed: int = dataclasses.field(default=0, metadata={"help": "clashes with a flag", "unit": ""})


KNOBS = {field.name: [("member", field)] for field in dataclasses.fields(Knobs)}


def parse(*argv: str, **environ: str) -> cli.ServeCommand:
    return cli.parse_serve(list(argv), knobs=KNOBS, environ=environ)


def refused(capsys: pytest.CaptureFixture[str], *argv: str, **environ: str) -> str:
    with pytest.raises(SystemExit) as caught:
        parse(*argv, **environ)
    assert caught.value.code == 2
    return capsys.readouterr().err


def test_defaults() -> None:
    command = parse()
    assert command == cli.ServeCommand(EngineConfig(), ServerConfig())
    assert command.server.host == "127.0.0.1"
    assert command.server.port == 8000
    assert command.engine.model is None


def test_names_that_users_of_other_servers_type() -> None:
    command = parse(
        "org/model",
        "--served-model-name=a,b",
        "--host=0.0.0.0",
        "--port=9",
        "--api-key=x,y",
        "--api-key=z",
        "--dtype=bfloat16",
        "--max-model-len=32k",
        "--max-num-seqs=16",
        "--max-num-batched-tokens=2048",
        "--block-size=32",
        "--gpu-memory-utilization=0.8",
        "--kv-cache-memory-bytes=4GiB",
        "--tensor-parallel-size=1",
        "--seed=7",
        "--enable-log-requests",
        "--no-compilation-cache",
        "--disable-log-stats",
        "--default-chat-template-kwargs",
        '{"enable_thinking": false}',
    )
    engine, server = command.engine, command.server
    assert engine.model == "org/model"
    assert server.served_model_name == ("a", "b")
    assert (server.host, server.port) == ("0.0.0.0", 9)
    assert server.api_key == ("x,y", "z")  # a key may contain a comma
    assert engine.max_model_len == 32768
    assert engine.page_size == 32
    assert engine.memory_fraction == 0.8
    assert engine.kv_cache_memory_bytes == 4 * 2**30
    assert engine.seed == 7
    assert engine.compilation_cache is False
    assert server.enable_log_requests
    assert server.disable_log_stats
    assert dict(server.default_chat_template_kwargs) == {"enable_thinking": False}


def test_method_knobs() -> None:
    engine = parse("--window-tokens=128", "--method-param", "member.window_tokens=3").engine
    assert dict(engine.method_params) == {"window_tokens": 128, "member.window_tokens": 3}
    assert parse("--request-methods", "a(x=1,y=2)+b,c").engine.request_methods == ("a(x=1,y=2)+b", "c")


def test_a_knob_never_hides_a_setting() -> None:
    assert parse("--seed=5").engine.seed == 5


def test_precedence(tmp_path: pathlib.Path) -> None:
    path = tmp_path / "c.yaml"
    path.write_text("port: 1\nhost: h1\ndtype: float32\nmax-model-len: 64\nwindow_tokens: 9\napi-key: [a, b]\n")
    environ = {"SPARSEJAX_PORT": "2", "SPARSEJAX_HOST": "h2", "SPARSEJAX_WINDOW_TOKENS": "10"}
    command = parse("--config", str(path), "--port=3", **environ)
    assert command.server.port == 3
    assert command.server.host == "h2"
    assert command.engine.dtype == "float32"
    assert command.engine.max_model_len == 64
    assert dict(command.engine.method_params) == {"window_tokens": 10}
    assert command.server.api_key == ("a", "b")
    assert command.engine.seed == 0


def test_environment() -> None:
    environ = {
        "SPARSEJAX_API_KEY": "k",
        "SPARSEJAX_OFFLINE": "true",
        "SPARSEJAX_BLOCK_SIZE": "64",
        "SPARSEJAX_STRICT_REQUESTS": "0",
        "SPARSEJAX_MAX_MODEL_LEN": "auto",
    }
    command = parse(**environ)
    assert command.server.api_key == ("k",)
    assert command.engine.offline
    assert command.engine.page_size == 64
    assert not command.server.strict_requests
    assert command.engine.max_model_len is None


@pytest.mark.parametrize(
    ("argv", "parts"),
    [
        (["--max-modellen=5"], ["--max-modellen", "did you mean --max-model-len?"]),
        (["--windw-tokens=5"], ["--windw-tokens", "did you mean --window-tokens?"]),
        (["--zzzzzz"], ["unknown flag --zzzzzz"]),
        (["a", "b"], ["unexpected argument b"]),
        (["a", "--model=b"], ["given twice"]),
        (["--dtype=bfloat61"], ["--dtype", "float32", "did you mean bfloat16?"]),
        (["--port=70000"], ["--port", "65535"]),
        (["--port=x"], ["--port", "integer"]),
        (["--port=1.5"], ["--port", "integer"]),
        (["--max-model-len=0"], ["--max-model-len", "at least 1"]),
        (["--memory-fraction=1.5"], ["--memory-fraction", "at most 1"]),
        (["--memory-fraction=nan"], ["--memory-fraction", "finite"]),
        (["--gpu-memory-utilization=0"], ["--memory-fraction", "0.01"]),
        (["--kv-cache-memory-bytes=4XB"], ["--kv-cache-memory-bytes", "4GiB"]),
        (["--tensor-parallel-size=2"], ["--tensor-parallel-size 2", "one device"]),
        (["--drain-timeout-s=-1"], ["--drain-timeout-s", "at least 0 s"]),
        (["--queue-timeout-s=inf"], ["--queue-timeout-s", "finite"]),
        (["--ssl-keyfile=k"], ["--ssl-certfile"]),
        (["--api-key="], ["--api-key is empty"]),
        (["--method-param=x"], ["NAME=VALUE"]),
        (["--method-param=nope=1"], ["nope"]),
        (["--default-chat-template-kwargs=[1]"], ["JSON object"]),
        (["--default-chat-template-kwargs={"], ["not valid JSON"]),
        (["--config=/nowhere.yaml"], ["/nowhere.yaml", "No such file"]),
        (["--port"], ["--port", "expected one argument"]),
    ],
)
def test_refusals(capsys: pytest.CaptureFixture[str], argv: list[str], parts: list[str]) -> None:
    shown = refused(capsys, *argv)
    for part in parts:
        assert part in shown
    assert len(shown.splitlines()) == 2  # the reason and where to look, not a page of usage


@pytest.mark.parametrize(
    ("content", "parts"),
    [
        ("prot: 1", ["unknown key prot", "did you mean port?"]),
        ("port: [1]", ["port", "integer"]),
        ("offline: 3", ["offline", "true or false"]),
        ("host: 5", ["host", "string"]),
        ("- a", ["mapping"]),
        ("a: [", ["not valid YAML"]),
        ("port: true", ["port", "integer"]),
    ],
)
def test_yaml_refusals(
    capsys: pytest.CaptureFixture[str], tmp_path: pathlib.Path, content: str, parts: list[str]
) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(content)
    shown = refused(capsys, "--config", str(path))
    for part in parts:
        assert part in shown


def test_environment_refusals(capsys: pytest.CaptureFixture[str]) -> None:
    assert "SPARSEJAX_PORT must be an integer" in refused(capsys, SPARSEJAX_PORT="x")
    assert "SPARSEJAX_OFFLINE must be true or false" in refused(capsys, SPARSEJAX_OFFLINE="maybe")


def test_every_setting_is_complete() -> None:
    """Each field has help and a group, is reachable by flag, environment and YAML, and starts from a valid default."""
    parser = cli.Parser(prog="x")
    cli.add_settings(parser, EngineConfig, ServerConfig)
    text = parser.format_help()
    for config_type in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config_type):
            assert field.metadata["help"]
            assert config.flag_name(field.name) in text
            assert field.default is not dataclasses.MISSING


def samples() -> list[tuple[str, str, Any]]:
    """(field, text, value) of every plain setting: another value than the default, as a user would write it."""
    found: list[tuple[str, str, Any]] = []
    for config_type in (EngineConfig, ServerConfig):
        for field in dataclasses.fields(config_type):
            meta, annotation = field.metadata, config.field_types(config_type)[field.name]
            if meta["choices"]:
                found.append((field.name, meta["choices"][-1], meta["choices"][-1]))
            elif meta["kind"] == "" and annotation is bool:
                found.append((field.name, str(not field.default).lower(), not field.default))
            elif meta["kind"] == "" and annotation in (int, int | None) and field.name != "tensor_parallel_size":
                found.append((field.name, "77", 77))
            elif annotation in (str, str | None) and not field.name.startswith("ssl"):
                found.append((field.name, "text", "text"))
    return found


@pytest.mark.parametrize(("name", "text", "value"), samples(), ids=[name for name, _, _ in samples()])
def test_flag_environment_and_yaml_agree(tmp_path: pathlib.Path, name: str, text: str, value: Any) -> None:
    path = tmp_path / "c.yaml"
    path.write_text(f"{name.replace('_', '-')}: {text}\n")
    flag = config.flag_name(name)
    argv = [flag if value else f"--no-{flag[2:]}"] if isinstance(value, bool) else [f"{flag}={text}"]
    for command in (parse(*argv), parse(**{f"SPARSEJAX_{name.upper()}": text}), parse("--config", str(path))):
        owner = command.engine if hasattr(command.engine, name) else command.server
        assert getattr(owner, name) == value


def test_python_options() -> None:
    made = config.engine_config({"max_model_len": 64, "window_tokens": 5, "block_size": 8}, KNOBS)
    assert made.max_model_len == 64
    assert made.page_size == 8
    assert dict(made.method_params) == {"window_tokens": 5}
    assert dict(config.engine_config({"method_params": {"a": 1}}).method_params) == {"a": 1}
    with pytest.raises(ConfigError, match="unknown option max_modellen, did you mean max_model_len"):
        config.engine_config({"max_modellen": 5})
    with pytest.raises(ConfigError, match="--max-model-len must be an integer"):
        config.engine_config({"max_model_len": "5"})
    with pytest.raises(ConfigError, match="--offline must be true or false"):
        config.engine_config({"offline": 1})
    assert hash(made) == hash(config.engine_config({"max_model_len": 64, "window_tokens": 5, "page_size": 8}, KNOBS))


def test_real_knobs_have_flags() -> None:
    knobs = cli.method_knobs()
    assert knobs
    name = next(iter(knobs))
    command = cli.parse_serve([f"{config.flag_name(name)}=3"], environ={})
    assert dict(command.engine.method_params) == {name: 3}


@pytest.mark.parametrize(
    ("wanted", "says"),
    [
        ("triton", "can't use implementation 'triton': needs an NVIDIA GPU"),
        ("prefill_attention=mosaic_gpu", "prefill_attention can't use implementation 'mosaic_gpu'"),
        ("cuda", "no implementation 'cuda'; known: auto, "),
        ("page_scores=mosaic_gpu", "page_scores has no implementation 'mosaic_gpu'; known: "),
        ("attention=xla", "unknown operation 'attention'; known: "),
    ],
)
def test_kernels_that_cannot_be_had_are_refused_before_anything_is_loaded(wanted: str, says: str) -> None:
    config = EngineConfig(model="no/such-model", attention_impl=wanted)
    for start in (build.explain, lambda config: build.build_engine(config, None)):
        with pytest.raises(ConfigError) as refused:
            start(config)
        assert f"--attention-impl {wanted}: " in str(refused.value)
        assert says in str(refused.value)
