"""Create a job, write a note, and follow the job's facts.

python examples/follow_events.py ENDPOINT
"""

import asyncio
import sys

from forged.client import EARLIEST, ForgedClient
from forged.kernel.messages import Gap


async def main(endpoint: str) -> None:
    async with ForgedClient(endpoint) as client:
        await client.create_job("bert", {"nodes": 8})
        await client.note("bert", "warm-up is over")
        async with client.facts(since=EARLIEST, jobs=["bert"]) as facts:
            async for item in facts:
                if isinstance(item, Gap):
                    print(f"facts {item.first} to {item.last} were dropped: {item.reason}")
                else:
                    print(item.id, item.fact)
                    if item.type == "NoteAdded":
                        break


asyncio.run(main(sys.argv[1]))
