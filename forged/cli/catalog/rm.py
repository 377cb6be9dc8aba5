"""`forgectl ckpt rm` of a job: deletes one checkpoint of the catalogue, with its files."""

from __future__ import annotations

from forged.cli.catalog import names
from forged.cli.catalog.ls import size_text
from forged.cli.confirmation import is_confirmed
from forged.cli.forgectl import answers
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.output import answer
from forged.cli.forgectl.parser import Options
from forged.cli.process import EXIT_FAILED, EXIT_OK


def remove(options: Options) -> int:
    with DaemonConnection(options) as daemon:
        view = names.find(daemon, options.job, options.where)
        meta = answers.map_in(view, "meta")
        what = f"{names.described(meta)}, {size_text(meta.get('size_bytes'))}"
        if not is_confirmed(options, [f"checkpoint {what}, of job {options.job}"]):
            print("nothing deleted")
            return EXIT_FAILED
    with DaemonConnection(options) as daemon:
        # A new connection, because the daemon ends one that is silent while an operator thinks.
        daemon.request("DeleteCheckpoint", job=options.job, checkpoint_id=meta.get("checkpoint_id"))
    deleter = "a worker deletes its files with its next save" if view.get("is_managed") is False else "its files follow"
    reply = {"deleted": [{"checkpoint_id": meta.get("checkpoint_id"), "size_bytes": meta.get("size_bytes")}]}
    answer(options, reply, lambda: print(f"deleted {what}; {deleter}"))
    return EXIT_OK
