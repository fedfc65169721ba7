"""Guarantees of the command: exit codes, one-line errors, JSON reports."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace import errors
from headrace.bench import results
from headrace.cli import __main__ as command
from headrace.cli import bench, model, output, pipeline, up
from headrace.models import ImportFailed, ModelInfo, ModelNotFound
from tests.headrace.scripted_gateway import TIMINGS, TRACE_ID
from tests.headrace.test_client_sync import Server


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("COLUMNS", "160")
    return tmp_path / "cache"


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()
    yield server
    server.close()


@pytest.mark.parametrize(
    "argv",
    [
        [],
        ["dance"],
        ["ask"],
        ["ask", "x", "--temperature", "warm"],
        ["ask", "x", "--timeout", "0"],
        ["ask", "x", "--raw", "--system", "y"],
        ["up", "--port", "70000"],
        ["up", "--port", "²"],
        ["trace"],
        ["trace", "--last"],
        ["trace", "abc", "--last"],
        ["trace", "abc", "--jaeger", "http://127.0.0.1:1"],
        ["trace", "abc", "--jaeger", "nonsense"],
        ["model"],
        ["bench", "offline", "--workload", "w9"],
        ["bench", "offline", "--pipeline", "--target", "x"],
        ["bench", "offline", "--repeat", "0"],
        ["up", "--model", "no-such-model", *(f"--{name}port=0" for name in ("", "tokenizer-", "stream-", "engine-"))],
        ["up", "--port", "5000", "--engine-port", "5000"],
    ],
)
def test_bad_usage_is_2(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Bad usage, and what is not there, is exit code 2 with a line on standard error and no traceback."""
    assert command.main(argv) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.strip()
    assert "Traceback" not in captured.err


@pytest.mark.parametrize(
    "argv",
    ["", "up", "ask", "stats", "trace", "model import", "bench offline", "bench hops", "bench steps", "bench accuracy"],
)
def test_help(argv: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Every subcommand explains itself and its exit codes."""
    assert command.main([*argv.split(), "--help"]) == 0
    assert "exit codes" in capsys.readouterr().out


def test_ask(server: Server, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """`ask` prints answer, stage table and trace id, writes the report, and remembers the receipt for `trace`."""
    report_file = tmp_path / "ask.json"
    argv = ["ask", "Where?", "--target", server.target, "--system", "Be brief.", "--temperature", "0", "--stop", "\n"]
    assert command.main([*argv, "--json", str(report_file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("The capital is Paris.\n")
    assert "prefill" in printed
    assert f"trace {TRACE_ID}" in printed
    report = json.loads(report_file.read_text())
    assert (report["text"], report["finish_reason"]) == ("The capital is Paris.", "stop")
    assert (report["trace_id"], report["timings"]["total_ns"]) == (TRACE_ID, TIMINGS.total_ns)
    assert report["wall_ns"] > 0
    generation = server.gateway.requests[0].generation
    assert [message.content for message in generation.chat.messages] == ["Be brief.", "Where?"]
    assert generation.sampling.HasField("temperature")
    assert not generation.sampling.HasField("top_p")
    assert not generation.HasField("max_tokens")
    for which in (["--last"], [TRACE_ID], ["server-id"], [str(report_file)]):
        assert command.main(["trace", *which]) == 0
        assert f"receipt of trace {TRACE_ID}" in capsys.readouterr().out


def test_ask_json_on_standard_output(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--json -` standard output is the JSON alone."""
    assert command.main(["ask", "x", "--raw", "--target", server.target, "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["text"] == "The capital is Paris."
    assert "prefill" in captured.err
    assert server.gateway.requests[0].generation.prompt == "x"


def test_ask_quiet(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """With `--quiet` standard output is the answer alone."""
    assert command.main(["ask", "x", "--quiet", "--target", server.target]) == 0
    assert capsys.readouterr().out == "The capital is Paris.\n"


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.InvalidArgument("too long", field="generation.prompt"), 2),
        (errors.NotFound("no model"), 2),
        (errors.ResourceExhausted("full"), 1),
    ],
)
def test_ask_refused(
    server: Server, error: errors.HeadraceError, code: int, capsys: pytest.CaptureFixture[str]
) -> None:
    """A refusal is one line with its name and its request; what the caller did wrong is 2, the rest 1."""
    server.gateway.error = error
    assert command.main(["ask", "x", "--target", server.target]) == code
    assert f"{type(error).__name__}: {error.message} (request server-id)" in capsys.readouterr().err


def test_nobody_listens(capsys: pytest.CaptureFixture[str]) -> None:
    """No gateway: exit code 1 and what to do."""
    assert command.main(["ask", "x", "--target", "127.0.0.1:1", "--timeout", "0.2"]) == 1
    assert "headrace up" in capsys.readouterr().err
    assert command.main(["stats", "--target", "127.0.0.1:1"]) == 1
    assert "Unavailable" in capsys.readouterr().err


def test_json_that_cannot_be_written(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """A report that cannot be written is told."""
    assert command.main(["stats", "--target", server.target, "--json", "/no/such/place"]) == 2
    assert "/no/such/place" in capsys.readouterr().err


def test_stats(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """`stats` shows each engine, and says which cannot be reached."""
    assert command.main(["stats", "--target", server.target, "--json", "-"]) == 0
    captured = capsys.readouterr()
    engines = json.loads(captured.out)["engines"]
    assert (engines[0]["stats"]["running_count"], engines[1]["reachable"]) == (2, False)
    formats = [engines[0][name] for name in ("dtype", "quantization", "kv_cache_dtype")]
    assert formats == ["bfloat16", "none", "int8"]
    assert "not reachable" in captured.err
    assert "int8" in captured.err
    assert "300 MB, 220 MB without files" in captured.err
    assert "kv total block" in captured.err


def test_interrupt_is_130(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    """Ctrl-C during an answer ends the generation and the command with 130."""
    server.gateway.endless = True
    environ = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    argv = [sys.executable, "-m", "headrace.cli", "ask", "x", "--target", server.target]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(4) == "The "
        process.send_signal(signal.SIGINT)
        process.stdout.read()
        assert process.stderr.read() == "headrace: interrupted\n"
    assert process.returncode == 130
    assert server.ending() == "cancelled"


def test_terminal_is_not_steered() -> None:
    """Control characters of an answer do not reach a terminal."""
    assert output.printable("a\x1b[2J\tb\n\x9b\x7f") == "a\ufffd[2J\tb\n\ufffd\ufffd"


def test_model_list(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """`model list` shows what is stored, and what is wrong with it."""
    assert command.main(["model", "list"]) == 0
    assert "headrace model import" in capsys.readouterr().out
    info = ModelInfo("m", tmp_path, 2_000_000, "LlamaForCausalLM", "bfloat16", 64, "['x'] is [bad]")
    monkeypatch.setattr(model, "list_models", lambda: [info])
    assert command.main(["model", "list", "--json", "-"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["models"][0]["context"] == 64
    assert "['x'] is [bad]" in captured.err


@pytest.mark.parametrize(("error", "code"), [(ImportFailed("no net; run this"), 1), (ModelNotFound("no such"), 2)])
def test_model_import_fails(
    error: Exception, code: int, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model that cannot be had is one sentence."""

    def fail(*_: Any, progress: Any) -> None:
        progress("fetching", 0.5)
        raise error

    monkeypatch.setattr(model, "import_model", fail)
    assert command.main(["model", "import", "x"]) == code
    assert f"headrace: {error}" in capsys.readouterr().err


def test_up_flags_become_variables() -> None:
    """Every engine flag is the environment variable that its help names."""
    argv = ["up", "--model", "m", "--dtype", "float32", "--kv-blocks", "9", "--block-size", "8", "--threads", "1"]
    argv += ["--max-num-seqs", "2", "--max-num-batched-tokens", "64", "--max-model-len", "128", "--log-level", "debug"]
    argv += [
        "--num-speculative-tokens",
        "3",
        "--trace-endpoint",
        "http://x:1",
        "--bind",
        "127.0.0.2",
        "--port",
        "1",
        "--engine-port",
        "0",
    ]
    options = up.options_of(command.build_parser().parse_args(argv))
    assert options == pipeline.PipelineOptions(
        variables={
            "HEADRACE_MODEL": "m",
            "HEADRACE_ENGINE_DTYPE": "float32",
            "HEADRACE_ENGINE_KV_BLOCKS": "9",
            "HEADRACE_ENGINE_BLOCK_SIZE": "8",
            "HEADRACE_ENGINE_MAX_NUM_SEQS": "2",
            "HEADRACE_ENGINE_MAX_NUM_BATCHED_TOKENS": "64",
            "HEADRACE_ENGINE_NUM_SPECULATIVE_TOKENS": "3",
            "HEADRACE_ENGINE_MAX_MODEL_LEN": "128",
            "HEADRACE_ENGINE_THREADS": "1",
            "HEADRACE_TRACE_ENDPOINT": "http://x:1",
            "HEADRACE_LOG_LEVEL": "debug",
        },
        ports={"gateway": 1, "engine": 0},
        bind="127.0.0.2",
    )


def test_bench_without_services(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Where the services are not, `bench offline` and `up` say so."""
    monkeypatch.setattr(pipeline.importlib.util, "find_spec", lambda _name: None)
    assert command.main(["bench", "offline"]) == 1
    assert command.main(["up"]) == 1
    assert capsys.readouterr().err.count("the services are not here") == 2


def test_bench_report(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The report is that of the median pass, and holds every pass."""
    passes = iter([results.Run(s, 10, 0, 100, [0.1, 0.3], [0.01]) for s in (1.0, 4.0, 2.0)])

    def measure(arguments: Any) -> dict[str, Any]:
        return results.report(arguments.workload, "engine", list(passes))

    monkeypatch.setattr(bench, "measure", measure)
    assert command.main(["bench", "offline", "--repeat", "3", "--json", "-"]) == 0
    captured = capsys.readouterr()
    report = json.loads(captured.out)
    assert report["output_tokens_per_s"] == 50.0
    assert [run["output_tokens_per_s"] for run in report["runs"]] == [100.0, 25.0, 50.0]
    assert (report["ttft_s"]["p50"], report["ttft_s"]["p95"]) == (0.3, 0.3)
    assert "50.0" in captured.err
