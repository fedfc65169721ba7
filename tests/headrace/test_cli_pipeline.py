"""Guarantees of the plan of a pipeline: ports, addresses, and which source of a setting wins."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli import pipeline, ports
from headrace.cli.pipeline import BadOption, PipelineError, PipelineOptions

FREE = dict.fromkeys(pipeline.PORTS, 0)


@pytest.fixture
def taken() -> Iterator[int]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield int(server.getsockname()[1])


def test_free_ports_and_addresses() -> None:
    """Port 0 is a free one, and every process is told where the others are."""
    planned = pipeline.plan(PipelineOptions(ports=FREE), {})
    environ = planned.programs[0].environ
    numbers = {environ[f"HEADRACE_{name.upper()}_PORT"] for name in pipeline.PORTS}
    assert len(numbers) == 4
    assert planned.target == planned.addresses["gateway"] == f"127.0.0.1:{environ['HEADRACE_GATEWAY_PORT']}"
    assert environ["HEADRACE_GATEWAY_TOKENIZER_ADDRESS"] == planned.addresses["tokenizer"]
    assert environ["HEADRACE_GATEWAY_STREAM_ADDRESS"] == planned.addresses["stream"]
    assert environ["HEADRACE_GATEWAY_ENGINE_ADDRESSES"] == planned.addresses["engine"]
    assert environ["HEADRACE_LOG_FORMAT"] == "console"
    assert [program.command[-1] for program in planned.programs][-1] == "services.gateway"


def test_flag_wins_over_environment_wins_over_file(tmp_path: Path) -> None:
    """A flag wins over the environment, the environment over the file; what nobody says is left alone."""
    file = tmp_path / "headrace.toml"
    file.write_text('model = "from-file"\n[gateway]\nhost = "127.0.0.2"\n[log]\nformat = "json"\n')
    environ = {"HEADRACE_CONFIG": str(file)}
    planned = pipeline.plan(PipelineOptions(ports=FREE), environ)
    assert planned.model == "from-file"
    assert planned.target.startswith("127.0.0.2:")
    assert "HEADRACE_LOG_FORMAT" not in planned.programs[0].environ
    environ["HEADRACE_MODEL"] = "from-environment"
    assert pipeline.plan(PipelineOptions(ports=FREE), environ).model == "from-environment"
    options = PipelineOptions({"HEADRACE_MODEL": "from-flag"}, FREE, bind="127.0.0.3")
    planned = pipeline.plan(options, environ)
    assert planned.model == planned.programs[0].environ["HEADRACE_MODEL"] == "from-flag"
    assert planned.target.startswith("127.0.0.3:")


def test_port_of_the_environment(taken: int) -> None:
    """A port of the environment counts, and a flag wins over it."""
    free = ports.free("127.0.0.1", 1)[0]
    environ = {"HEADRACE_GATEWAY_PORT": str(taken)}
    assert pipeline.plan(PipelineOptions(ports={**FREE, "gateway": free}), environ).target == f"127.0.0.1:{free}"
    without = {name: 0 for name in FREE if name != "gateway"}
    with pytest.raises(PipelineError, match=f"port {taken}"):
        pipeline.plan(PipelineOptions(ports=without), environ)


def test_metrics_are_offered_beside_named_ports(taken: int) -> None:
    """Ten above a port that was named; nowhere beside a free one; a setting wins; a port in use is told."""
    free = next(p for p in ports.free("127.0.0.1", 50) if p < 65000 and not ports.check("127.0.0.1", p + 10))
    planned = pipeline.plan(PipelineOptions(ports={**FREE, "engine": free}), {})
    assert planned.metrics == {"engine": f"127.0.0.1:{free + 10}"}
    environ = planned.programs[0].environ
    assert environ["HEADRACE_ENGINE_METRICS_PORT"] == str(free + 10)
    assert environ["HEADRACE_GATEWAY_METRICS_PORT"] == "0"
    options = PipelineOptions({"HEADRACE_ENGINE_METRICS_PORT": "0"}, {**FREE, "engine": free})
    assert pipeline.plan(options, {}).metrics == {}
    options = PipelineOptions({"HEADRACE_ENGINE_METRICS_PORT": str(taken)}, FREE)
    with pytest.raises(PipelineError, match=f"metrics of the engine: port {taken}"):
        pipeline.plan(options, {})


def test_wildcard_is_called_by_loopback() -> None:
    """A gateway that listens everywhere is called at 127.0.0.1."""
    planned = pipeline.plan(PipelineOptions(ports=FREE, bind="0.0.0.0"), {})  # noqa: S104
    assert planned.target.startswith("127.0.0.1:")
    assert planned.programs[0].environ["HEADRACE_GATEWAY_HOST"] == "0.0.0.0"  # noqa: S104


def test_port_in_use_names_port_and_owner(taken: int) -> None:
    """A port in use is told with the process, the port and who holds it."""
    with pytest.raises(PipelineError) as caught:
        pipeline.plan(PipelineOptions(ports={**FREE, "engine": taken}), {})
    assert f"engine: port {taken} is in use by pid {os.getpid()} (" in str(caught.value)


def test_two_on_one_port() -> None:
    """Two processes on one port are a bad option that names both."""
    with pytest.raises(BadOption, match="tokenizer and gateway"):
        pipeline.plan(PipelineOptions(ports={**FREE, "gateway": 5, "tokenizer": 5}), {})


@pytest.mark.parametrize("value", ["x", "-1", "65536", "1.5", "²"])
def test_bad_port_of_the_environment(value: str) -> None:
    """A port that is none names its variable."""
    with pytest.raises(BadOption, match="HEADRACE_ENGINE_PORT"):
        pipeline.plan(PipelineOptions(), {"HEADRACE_ENGINE_PORT": value})


def test_bad_file(tmp_path: Path) -> None:
    """A file that cannot be read names its variable."""
    with pytest.raises(BadOption, match="HEADRACE_CONFIG"):
        pipeline.plan(PipelineOptions(), {"HEADRACE_CONFIG": str(tmp_path / "none.toml")})


def test_address_that_is_not_ours() -> None:
    """An address of no machine, or of another one, is told as that."""
    assert "no address" in ports.check("no such host.invalid", 1)
    assert "cannot be listened on" in ports.check("192.0.2.1", 50050)


def test_services_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the services the command says so."""
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(PipelineError, match="checkout"):
        pipeline.plan(PipelineOptions(ports=FREE), {})
