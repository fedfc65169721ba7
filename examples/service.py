"""A backend service that summarises texts: one connection, deadlines, retries, typed errors.

HEADRACE_KEY=... python examples/service.py 127.0.0.1:50050 "A long text."
"""

import asyncio
import os
import sys

from headrace import AsyncClient, errors


async def summarise(client: AsyncClient, text: str) -> str:
    """One whole answer within 20 seconds, tries included."""
    answer = await client.generate(
        messages=[("system", "Summarise in one sentence."), ("user", text)],
        max_tokens=60,
        temperature=0,
        priority="standard",
        timeout=20,
    )
    return answer.text


async def tell(client: AsyncClient, text: str) -> None:
    """The same for somebody who looks on."""
    async with client.stream(
        messages=[("user", f"Say more about: {text}")], max_tokens=60, temperature=0, priority="interactive", timeout=20
    ) as stream:
        async for delta in stream:
            sys.stdout.write(delta.text)
            sys.stdout.flush()
    sys.stdout.write(f"\n{stream.answer.usage.completion_token_count} tokens\n")


async def main(target: str, text: str) -> int:
    """Asks twice; says what went wrong."""
    async with AsyncClient(target, api_key=os.environ.get("HEADRACE_KEY"), retries=3) as client:
        try:
            sys.stdout.write(await summarise(client, text) + "\n")
            await tell(client, text)
        except errors.ResourceExhausted as error:
            sys.stderr.write(f"over the limit {error.quota or 'of the server'}; again in {error.retry_after_s} s\n")
            return 1
        except errors.HeadraceError as error:
            sys.stderr.write(f"{error.reason}: {error.message} (request {error.request_id})\n")
            return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(asyncio.run(main(*sys.argv[1:3])))
