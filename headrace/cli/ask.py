"""`headrace ask`: streams one answer, then shows where its time went."""

from __future__ import annotations

import argparse
import sys
import time
from typing import Any

from rich.console import Console

from headrace import errors
from headrace.cli import output, receipts, stages
from headrace.sync_client import Client

CONNECT_S = 5.0
_BAD_USAGE = (errors.InvalidArgument, errors.NotFound, errors.Unimplemented)


def add_parser(subparsers: Any) -> None:
    """Adds the subcommand."""
    parser: argparse.ArgumentParser = subparsers.add_parser(
        "ask",
        help="ask a question and see where the time went",
        description="Streams the answer to standard output, then prints the stage table of its receipt and its trace "
        "id. The receipt is remembered: see `headrace trace --last`.",
        epilog=output.EXIT_CODES,
    )
    parser.add_argument("question", help="what to ask; -: read it from standard input")
    output.add_target_option(parser)
    parser.add_argument("--model", help="which model (default: the only one served)")
    parser.add_argument("--system", metavar="TEXT", help="system message before the question")
    parser.add_argument("--raw", action="store_true", help="continue the text as it is; no chat template")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="most tokens to generate")
    parser.add_argument("--temperature", type=float, help="0: greedy (default: the model's own)")
    parser.add_argument("--top-p", type=float)
    parser.add_argument("--top-k", type=int)
    parser.add_argument("--min-p", type=float)
    parser.add_argument("--seed", type=int)
    parser.add_argument("--stop", action="append", metavar="TEXT", help="text that ends the answer; may be repeated")
    parser.add_argument("--priority", choices=("interactive", "standard", "batch"), default="interactive")
    parser.add_argument("--resumable", action="store_true", help="go on by itself after a lost connection or process")
    parser.add_argument("--quiet", action="store_true", help="the answer alone, no table")
    output.add_json_option(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Runs it; raises CommandError."""
    question = sys.stdin.read() if arguments.question == "-" else arguments.question
    if arguments.raw and arguments.system is not None:
        raise output.CommandError("--system needs the chat template; it cannot go with --raw", output.BAD_USAGE)
    options = sampling(arguments)
    if arguments.resumable:
        options["resumable"] = True
    if arguments.raw:
        options["prompt"] = question
    else:
        system = [("system", arguments.system)] if arguments.system is not None else []
        options["messages"] = [*system, ("user", question)]
    console = output.stdout(json_target=arguments.json)
    report = ask(arguments.target, options, console, show_table=not arguments.quiet)
    output.write_json(arguments.json, report)
    return output.OK


def sampling(arguments: argparse.Namespace) -> dict[str, Any]:
    """The options of `generate` that were given on the command line."""
    names = ("model", "max_tokens", "temperature", "top_p", "top_k", "min_p", "seed", "stop", "priority", "timeout")
    given = {name: getattr(arguments, name) for name in names}
    return {name: value for name, value in given.items() if value is not None}


def ask(target: str, options: dict[str, Any], console: Console, *, show_table: bool = True) -> dict[str, Any]:
    """Asks, prints the answer as it comes, then the table; returns the report.

    Raises:
        CommandError: nobody listens at the target, or the call failed.
    """
    with Client(target) as client:
        if not client.wait_until_connected(min(CONNECT_S, options.get("timeout", CONNECT_S))):
            raise output.CommandError(f"no gateway answers at {target}; start one with `headrace up`")
        begun = time.monotonic_ns()
        try:
            with client.stream(**options) as stream:
                for delta in stream:
                    _show(console, delta.text)
        except errors.HeadraceError as error:
            raise failure(error) from error
        wall_ns = time.monotonic_ns() - begun
    answer = stream.answer
    _show(console, "\n")
    receipt = receipts.Receipt.of(answer, wall_ns)
    try:
        receipts.remember(receipt)
    except OSError as error:
        output.stderr().print(f"the receipt could not be remembered: {error}")
    if show_table:
        console.print()
        console.print(stages.table(answer.timings, answer.usage, wall_ns))
        console.print(f"trace {answer.trace_id}", soft_wrap=True)
        if stream.resume_count:
            console.print(f"resumed {stream.resume_count} {'time' if stream.resume_count == 1 else 'times'}")
    return {
        "text": answer.text,
        "finish_reason": str(answer.finish_reason),
        "matched_stop": answer.matched_stop,
        "resume_count": stream.resume_count,
        **receipt.as_json(),
    }


def failure(error: errors.HeadraceError) -> output.CommandError:
    """What a failed call means to the person at the terminal."""
    name = type(error).__name__
    request = f" (request {error.request_id})" if error.request_id else ""
    code = output.BAD_USAGE if isinstance(error, _BAD_USAGE) else output.FAILED
    return output.CommandError(f"{name}: {error.message}{request}", code)


def _show(console: Console, text: str) -> None:
    stream = console.file
    stream.write(output.printable(text) if stream.isatty() else text)
    stream.flush()
