"""`forgectl models` against a real daemon."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import forged.checkpoint
from forged.cli.forgectl import candidates, main
from forged.cli.forgectl.answers import Row
from forged.cli.forgectl.connection import DaemonConnection
from forged.cli.forgectl.parser import Options
from forged.plain_client.connection import PlainConnection
from tests.cli.models.conftest import MODEL, RegistryDaemon


def fields_of(lines: list[str]) -> dict[str, str]:
    """The fields of `show`."""
    return dict(re.split(r" {2,}", line, maxsplit=1) for line in lines)


class TestRegistration:
    def test_file_is_registered_with_its_checksum(self, on_daemon: RegistryDaemon) -> None:
        [said] = on_daemon.lines(
            f"register {MODEL} --files '{on_daemon.file('weights')}' --input-shape 1x28x28 --tag a=b"
        )
        assert said.startswith("registered resnet@0.1.0, 7 B, sha256:")
        assert said.endswith("; `forgectl models promote resnet@0.1.0` begins its validation")
        shown = on_daemon.json(f"show {MODEL}")
        assert shown["metadata"]["input_shape"] == [1, 28, 28]
        assert shown["metadata"]["tags"] == {"a": "b"}
        assert shown["metadata"]["version"] == "0.1.0"

    def test_options_may_stand_between_the_arguments(self, on_daemon: RegistryDaemon, tmp_path: Path) -> None:
        on_daemon.register("1.0.0")
        assert on_daemon.json(f"tag {MODEL}@1.0.0 --remove a b=c")["tags"] == {"b": "c"}
        assert on_daemon.json(f"policy {MODEL} --reason x canary=act")["canary"] == "act"
        on_daemon.lines(f"register weights --files '{on_daemon.file('weights')}'")
        assert on_daemon.json(f"pull weights --timeout 60 {tmp_path}/copy")["target"] == f"{tmp_path}/copy"

    def test_next_versions_are_assigned(self, on_daemon: RegistryDaemon) -> None:
        file = on_daemon.file("weights")
        for words, version in (("resnet@1.4.2", "1.4.2"), ("resnet --bump major", "2.0.0"), ("resnet", "2.1.0")):
            assert on_daemon.json(f"register {words} --files '{file}'")["version"] == version

    def test_checkpoint_is_registered_from_its_path(self, on_daemon: RegistryDaemon) -> None:
        forged.checkpoint.save(on_daemon.folder / "step-7", {"w": np.zeros(8)}, step=7)
        metadata = on_daemon.json(f"register {MODEL} --checkpoint {on_daemon.folder}/step-7")
        assert metadata["checksum"].startswith("forged:")
        assert metadata["size_bytes"] == 64
        lines = on_daemon.lines(f"lineage {MODEL}@0.1.0")
        assert f"checkpoint  {on_daemon.folder}/step-7" in lines
        assert "up to       step 7, epoch 0" in lines

    def test_checkpoint_is_found_in_the_catalogue_of_a_job(self, on_daemon: RegistryDaemon) -> None:
        forged.checkpoint.save(on_daemon.folder / "step-7", {"w": np.zeros(8)}, step=7)
        on_daemon.client.create_job("run")
        adopt = ["--socket", on_daemon.daemon.socket, "ckpt", "adopt", str(on_daemon.folder), "--job", "run"]
        assert main.main(adopt) == 0
        on_daemon.run("ls")  # takes what was printed so far
        metadata = on_daemon.json(f"register {MODEL} --checkpoint @7 --job run")
        assert metadata["size_bytes"] == 64
        lineage = fields_of(on_daemon.lines(f"lineage {MODEL}"))
        assert re.fullmatch(rf"ckpt-\S+ of job run, {on_daemon.folder}/step-7", lineage["checkpoint"])
        assert (lineage["trained by"], lineage["up to"]) == ("job run", "step 7, epoch 0")
        assert on_daemon.run(f"register {MODEL} --checkpoint @8 --job run")[0] == 3

    def test_damaged_checkpoint_is_not_registered(self, on_daemon: RegistryDaemon) -> None:
        forged.checkpoint.save(on_daemon.folder / "step-7", {"w": np.zeros(8)}, step=7)
        [part] = (on_daemon.folder / "step-7").glob("*")
        part.write_bytes(part.read_bytes()[:-1] + b"x")
        code, out, err = on_daemon.run(f"register {MODEL} --checkpoint {on_daemon.folder}/step-7")
        assert (code, out) == (1, "")
        assert "corrupt" in err
        assert on_daemon.json("ls") == {"models": []}

    def test_name_with_a_space_is_quoted_in_hints(self, on_daemon: RegistryDaemon) -> None:
        [said] = on_daemon.lines("register 'Res Net' --checksum x")
        assert said == "registered Res Net@0.1.0, x; `forgectl models promote 'Res Net@0.1.0'` begins its validation"

    def test_version_that_exists_is_refused(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        assert "has version 1.0.0 already" in on_daemon.refused(f"register {MODEL}@1.0.0 --checksum other")

    @pytest.mark.parametrize(
        ("words", "said"),
        [
            ("resnet", "nothing tells which files the version has"),
            ("resnet@1.0.0 --bump minor --checksum x", "both a version (1.0.0) and --bump"),
            ("resnet@newest --checksum x", "'newest' is not a version"),
            ("resnet --files /no/such/file", "/no/such/file does not exist"),
            ("resnet --job run --checksum x", "--job is given without --checkpoint"),
            ("resnet --input-shape 1,a --checksum x", "'1,a' is not a shape"),
            ("resnet --tag novalue --checksum x", "'novalue' is not a tag"),
        ],
    )
    def test_misuse_says_what_to_give(self, on_daemon: RegistryDaemon, words: str, said: str) -> None:
        code, out, err = on_daemon.run(f"register {words}")
        assert (code, out) == (2, "")
        assert said in err

    def test_checksum_that_the_files_do_not_have_is_refused(self, on_daemon: RegistryDaemon) -> None:
        code, _, err = on_daemon.run(f"register {MODEL} --files '{on_daemon.file('a')}' --checksum sha256:00")
        assert code == 2
        assert "given is sha256:00" in err


class TestLists:
    def test_models_are_listed_with_what_serves(self, on_daemon: RegistryDaemon) -> None:
        assert on_daemon.lines("ls") == ["no models; `forgectl models register MODEL --files PATH` registers one"]
        on_daemon.serve("1.0.0")
        on_daemon.register("1.1.0")
        on_daemon.client.move_alias(MODEL, "champion", "1.0.0")
        header, row = on_daemon.lines("ls")
        assert header.split() == ["model", "versions", "latest", "serving", "aliases", "canaries"]
        assert row.split() == ["resnet", "2", "1.1.0", "1.0.0", "champion=1.0.0", "advise"]

    def test_versions_are_listed_the_highest_first(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        on_daemon.client.move_alias(MODEL, "champion", "1.0.0")
        for name in ("resne", "resnes", "resnet-2", "aaa"):
            on_daemon.client.register_model(name, checksum="x")
        on_daemon.register("1.10.0", framework="onnx")
        on_daemon.register("1.9.0")
        rows = [line.split() for line in on_daemon.lines(f"versions {MODEL}")]
        assert [row[0] for row in rows] == ["version", "1.10.0", "1.9.0", "1.0.0"]
        assert rows[0][1:5] == ["state", "aliases", "framework", "size"]
        assert rows[3][1:4] == ["production", "champion,", "serving"]

    def test_all_pages_of_many_versions_are_listed(self, on_daemon: RegistryDaemon) -> None:
        for number in range(1, 521):
            on_daemon.client.register_model(MODEL, version=f"0.0.{number}", checksum="x")
        assert len(on_daemon.json(f"versions {MODEL}")["versions"]) == 520
        assert len(on_daemon.json("find --checksum x")["versions"]) == 520
        assert len(on_daemon.json(f"history {MODEL}")["entries"]) == 520

    def test_long_lists_are_cut_on_a_terminal(
        self, on_daemon: RegistryDaemon, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        monkeypatch.setenv("NO_COLOR", "1")
        for number in range(1, 46):
            on_daemon.client.register_model(MODEL, version=f"0.0.{number}", checksum="x")
            on_daemon.client.register_model(f"model-{number:02}", checksum="y")
        monkeypatch.setattr("sys.stdout.isatty", lambda: True)
        monkeypatch.setenv("COLUMNS", "200")
        for words in ("ls", f"versions {MODEL}", "find --checksum y", f"history {MODEL}"):
            lines = on_daemon.lines(words)
            assert len(lines) in (41, 42), words
            assert any("--all shows them" in line for line in (lines[0], lines[-1])), words
            assert len(on_daemon.lines(f"{words} --all")) in (45, 46, 47), words

    def test_versions_are_found_by_all_that_is_given(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        on_daemon.register("1.1.0", tags={"git": "abc"})
        for words, found in (
            ("--state production", ["1.0.0"]),
            ("--tag git", ["1.1.0"]),
            ("--tag git=abc RES", ["1.1.0"]),
            ("--tag git=other", []),
            ("--alias serving", ["1.0.0"]),
            ("nothing", []),
        ):
            versions = [one["version"] for one in on_daemon.json(f"find {words}")["versions"]]
            assert versions == found, words
        code, _, err = on_daemon.run("find")
        assert (code, "nothing is given to look for" in err) == (2, True)


class TestLifecycle:
    def test_version_goes_step_by_step_into_production(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        name = f"{MODEL}@1.0.0"
        assert on_daemon.lines(f"promote {name}") == [
            f"{name}: registered → validating; "
            f"record its evidence with `forgectl models validate {name}`, then promote it"
        ]
        refused = on_daemon.refused(f"promote {name}")
        assert "it was never validated" in refused
        assert f"`forgectl models validate {name}`" in refused
        [said] = on_daemon.lines(f"validate {name} --accuracy 0.93 --p50-ms 4 --p99-ms 11.5 --env gpu=a100")
        assert re.fullmatch(
            r"resnet@1.0.0: validation no. 1 passed, .*: p50 4 ms, p99 11.5 ms, accuracy 0.93; "
            r"`forgectl models promote resnet@1.0.0` promotes it",
            said,
        )
        assert on_daemon.lines(f"promote {name}") == [
            f"{name}: validating → staging; `forgectl models promote {name}` makes it a canary"
        ]
        assert on_daemon.json(f"promote {name}")["state"] == "canary"
        assert on_daemon.lines(f"promote {name} --reason release") == [f"{name}: canary → production; it serves now"]
        assert "no promotion leads on" in on_daemon.refused(f"promote {name}")

    def test_waiver_promotes_without_evidence_and_is_shown(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        on_daemon.promote("1.0.0")
        on_daemon.lines(f"promote {MODEL}@latest --waive 'the lab is closed'")
        assert "without evidence: the lab is closed" in on_daemon.lines(f"history {MODEL}")[-1]

    def test_rollback_returns_to_the_version_before(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        assert "cannot be rolled back" in on_daemon.refused(f"rollback {MODEL}")
        on_daemon.serve("1.1.0")
        assert on_daemon.lines(f"rollback {MODEL} --reason 'wrong labels'") == [
            "took resnet@1.1.0 out of service; resnet@1.0.0 serves"
        ]
        rows = [line.split()[:3] for line in on_daemon.lines(f"versions {MODEL}")[1:]]
        assert rows == [["1.1.0", "deprecated", "-"], ["1.0.0", "production", "serving"]]
        assert on_daemon.lines(f"transition {MODEL}@1.1.0 archived") == [
            "resnet@1.1.0: deprecated → archived; `forgectl models rm resnet@1.1.0` deletes it from the registry"
        ]
        assert on_daemon.lines(f"rm {MODEL}@1.1.0") == [
            "deleted resnet@1.1.0 from the registry; its files stay, and so does its history"
        ]

    def test_canary_is_rolled_back_to_staging(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.canary("1.0.0")
        assert on_daemon.lines(f"rollback {MODEL}@1.0.0") == [
            "took resnet@1.0.0 out of service; it is in staging again"
        ]
        assert "older than its rollback from canary" in on_daemon.refused(f"promote {MODEL}@1.0.0")
        on_daemon.validate("1.0.0")
        on_daemon.promote("1.0.0", 2)
        on_daemon.canary("1.1.0")
        assert on_daemon.lines(f"rollback {MODEL}@1.1.0") == ["took resnet@1.1.0 out of service; resnet@1.0.0 serves"]

    def test_serving_version_cannot_be_deprecated(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        on_daemon.serve("1.1.0")
        assert "`forgectl models rollback resnet`" in on_daemon.refused(f"transition {MODEL}@1.1.0 deprecated")

    def test_service_of_a_model_ends_with_a_reason(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        refused = on_daemon.refused(f"transition {MODEL}@1.0.0 deprecated")
        assert "`forgectl models transition resnet@1.0.0 deprecated --reason REASON`" in refused
        on_daemon.lines(f"transition {MODEL}@1.0.0 deprecated --reason 'the end'")
        assert on_daemon.json("ls")["models"][0]["serving"] is None
        assert on_daemon.lines(f"history {MODEL}")[-2].endswith(": the end)")
        assert "alias serving removed" in on_daemon.lines(f"history {MODEL}")[-2]

    @pytest.mark.parametrize("verb", ["promote", "validate", "canary", "tag", "rm"])
    def test_command_that_decides_needs_a_version(self, on_daemon: RegistryDaemon, verb: str) -> None:
        words = "resnet a=b" if verb == "tag" else "resnet"
        code, out, err = on_daemon.run(f"{verb} {words}")
        assert (code, out) == (2, "")
        assert "names no version (use resnet@VERSION, resnet@latest" in err


class TestEvidence:
    def test_samples_give_the_percentiles(self, on_daemon: RegistryDaemon, tmp_path: Path) -> None:
        on_daemon.register("1.0.0")
        for number, text in enumerate(("[4, 1, 9, 7]", "4 1\n9,7\n"), 1):
            (tmp_path / "samples").write_text(text)
            recorded = on_daemon.json(f"validate {MODEL}@1.0.0 --samples {tmp_path}/samples")
            assert recorded["number"] == number
            assert recorded["samples"] == 4
            assert (recorded["result"]["latency_p50_ms"], recorded["result"]["latency_p99_ms"]) == (4.0, 9.0)
        assert recorded["result"]["accuracy_score"] is None

    @pytest.mark.parametrize("text", ["", " \n", "[]"])
    def test_file_without_samples_is_no_evidence(self, on_daemon: RegistryDaemon, tmp_path: Path, text: str) -> None:
        on_daemon.register("1.0.0")
        (tmp_path / "samples").write_text(text)
        code, _, err = on_daemon.run(f"validate {MODEL}@1.0.0 --samples {tmp_path}/samples")
        assert (code, "contains no latencies" in err) == (2, True)

    def test_validations_are_listed_the_newest_first(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        assert on_daemon.lines(f"validations {MODEL}") == [
            "resnet@1.0.0 has not been validated; `forgectl models validate resnet@1.0.0` records a validation"
        ]
        on_daemon.validate("1.0.0", environment={"gpu": "a100"})
        on_daemon.lines(f"validate {MODEL}@1.0.0 --failed --error 'class 3 is never found'")
        header, newest, oldest = on_daemon.lines(f"validations {MODEL}@1.0.0")
        assert header.split()[:2] == ["number", "passed"]
        assert newest.split()[:2] == ["2", "no"]
        assert "class 3 is never found" in newest
        assert "gpu=a100" in oldest

    def test_evidence_of_other_files_is_refused(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        assert "got 'sha256:00'" in on_daemon.refused(f"validate {MODEL}@1.0.0 --checksum sha256:00")
        other = on_daemon.file("other")
        assert "checksum must be sha256:" in on_daemon.refused(f"validate {MODEL}@1.0.0 --files '{other}'")
        measured = on_daemon.folder / "weights 1.0.0.onnx"
        assert on_daemon.json(f"validate {MODEL}@1.0.0 --files '{measured}'")["number"] == 1
        assert "does not exist" in on_daemon.run(f"validate {MODEL}@1.0.0 --checkpoint /no/such/checkpoint")[2]

    def test_bad_canary_names_the_rollback(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        on_daemon.canary("1.1.0")
        [said] = on_daemon.lines(f"canary {MODEL}@1.1.0 --accuracy 0.5 --p99-ms 12")
        assert "rollback priority" in said
        assert said.endswith("; `forgectl models rollback resnet@1.1.0` takes it out of service")
        [said] = on_daemon.lines(f"canary {MODEL}@1.1.0 --accuracy 0.9 --p99-ms 12")
        assert "`" not in said

    def test_file_without_latencies_is_refused(self, on_daemon: RegistryDaemon, tmp_path: Path) -> None:
        on_daemon.register("1.0.0")
        (tmp_path / "samples").write_text("4 fast 7")
        code, _, err = on_daemon.run(f"validate {MODEL}@1.0.0 --samples {tmp_path}/samples")
        assert (code, "has other things than latencies" in err) == (2, True)


class TestQuestions:
    def test_show_has_everything_about_a_version(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        shown = fields_of(on_daemon.lines(f"show {MODEL}@serving"))
        assert shown["version"] == "1.0.0"
        assert shown["state"] == "production"
        assert shown["aliases"] == "serving"
        assert shown["files"] == f"{on_daemon.folder}/weights 1.0.0.onnx"
        assert shown["verified"] == "never"
        assert "p99 12 ms, accuracy 0.9" in shown["validation"]
        assert shown["policy"].startswith("promotion needs a validation of the last 30d00h; a canary is reported")

    def test_show_names_what_blocks_the_promotion(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        on_daemon.promote("1.0.0")
        shown = fields_of(on_daemon.lines(f"show {MODEL}"))
        assert shown["may become"] == "registered or staging"
        assert "never validated" in shown["blocked by"]

    def test_history_tells_who_did_what_and_why(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        on_daemon.serve("1.1.0")
        on_daemon.lines(f"rollback {MODEL} --reason 'wrong labels'")
        lines = on_daemon.lines(f"history {MODEL}")
        sentences = [re.sub(r"^ *\d+  \S+ \S+  ", "", line) for line in lines]
        assert sentences[0] == "1.0.0     registered  (uid 0)".replace("uid 0", sentences[0].partition("(")[2][:-1])
        assert [sentence.partition("  (")[0] for sentence in sentences[1:7]] == [
            "1.0.0     registered → validating",
            "1.0.0     validation 1: passed",
            "1.0.0     validating → staging, on validation 1",
            "1.0.0     staging → canary, on validation 1",
            "1.0.0     canary → production, on validation 1",
            "1.0.0     alias serving → 1.0.0",
        ]
        assert any("alias serving: 1.0.0 → 1.1.0" in sentence for sentence in sentences)
        assert "wrong labels" in lines[-1]
        about = on_daemon.json(f"history {MODEL}@1.1.0")["entries"]
        assert {one["version"] for one in about} == {"1.1.0"}
        assert [one["number"] for one in about] == sorted((one["number"] for one in about), reverse=True)

    def test_what_was_serving_is_told(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        code, out, _ = on_daemon.run(f"at {MODEL} 0s")
        assert (code, out.startswith("no version of resnet was serving at ")) == (1, True)
        on_daemon.promote("1.0.0")
        on_daemon.validate("1.0.0")
        on_daemon.promote("1.0.0", 3)
        [said] = on_daemon.lines(f"at {MODEL} 0s")
        assert re.fullmatch(r"resnet@1.0.0 was serving at .*, since .* \(entry 7 of its history\)", said)
        assert on_daemon.json(f"at {MODEL} 9999999999 --alias serving")["version"] == "1.0.0"

    def test_difference_reads_from_what_serves_to_the_latest(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        on_daemon.register("1.1.0", input_shape=[28], output_shape=[12], tags={"git": "abc"})
        lines = on_daemon.lines(f"diff {MODEL}")
        assert lines[0] == "resnet@1.0.0 → 1.1.0"
        assert re.search(r"  state +production → registered", "\n".join(lines))
        assert re.search(r"  tag git +- → abc", "\n".join(lines))
        assert lines[-1].startswith("suggests a patch version: only the weights change, as far as known: ")
        on_daemon.register("1.2.0", input_shape=[28], output_shape=[13])
        last = on_daemon.lines(f"diff {MODEL}@1.1.0 1.2.0")[-1]
        assert last.startswith("shape compatibility 50%; suggests a major version: output_shape changes from [12]")
        assert on_daemon.json(f"diff {MODEL}@1.1.0 1.0.0")["first"]["version"] == "1.1.0"
        assert on_daemon.json(f"diff {MODEL}@1.1.0 {MODEL}@serving")["second"]["version"] == "1.0.0"
        code, _, err = on_daemon.run(f"diff {MODEL}@1.1.0 other@1.0.0")
        assert (code, "resnet and other are two models" in err) == (2, True)

    def test_difference_without_a_serving_version_names_the_fix(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        refused = on_daemon.refused(f"diff {MODEL}")
        assert "no version of resnet serves, so latest has nothing to be compared with" in refused
        assert "`forgectl models diff resnet@VERSION`" in refused

    def test_best_version_is_named_with_its_measures(self, on_daemon: RegistryDaemon) -> None:
        code, out, _ = on_daemon.run("best")
        assert (code, out.startswith("none: ")) == (1, True)
        on_daemon.serve("1.0.0")
        on_daemon.canary("1.1.0", accuracy=0.95)
        [said] = on_daemon.lines(f"best {MODEL}")
        assert said.startswith("resnet@1.1.0 (canary): p50 4 ms, p99 12 ms, accuracy 0.95; ")
        assert on_daemon.run("best --min-accuracy 0.99")[0] == 1

    def test_lineage_without_a_checkpoint_says_so(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        assert fields_of(on_daemon.lines(f"lineage {MODEL}"))["trained by"] == (
            "unknown: it was registered without a checkpoint"
        )


class TestLabels:
    def test_tags_are_set_and_removed(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        assert on_daemon.lines(f"tag {MODEL}@1.0.0 git=abc owner=me") == ["resnet@1.0.0: git=abc owner=me"]
        assert on_daemon.lines(f"tag {MODEL}@latest --remove git") == ["resnet@1.0.0: owner=me"]
        assert on_daemon.lines(f"tag {MODEL}@latest --remove owner") == ["resnet@1.0.0: no tags"]
        assert on_daemon.run(f"tag {MODEL}@1.0.0")[0] == 2

    def test_alias_is_moved_and_removed(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        assert on_daemon.lines(f"alias {MODEL}@1.0.0 champion") == ["resnet@champion is resnet@1.0.0 now"]
        assert fields_of(on_daemon.lines(f"show {MODEL}@champion"))["version"] == "1.0.0"
        assert on_daemon.lines(f"alias {MODEL} champion --remove") == ["removed the alias champion of resnet"]
        assert "has no version and no alias 'champion'" in on_daemon.refused(f"show {MODEL}@champion")
        assert "moves by promotion and rollback only" in on_daemon.refused(f"alias {MODEL}@1.0.0 serving")

    def test_policy_is_shown_and_changed_key_by_key(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        lines = on_daemon.lines(f"policy {MODEL} min_accuracy=0.9 canary=act")
        assert fields_of(lines[:-1])["min_accuracy"] == "0.9"
        assert lines[-1] == (
            "promotion needs a validation of the last 30d00h with accuracy >= 0.9; "
            "a canary is rolled back from priority 1 on"
        )
        assert on_daemon.json(f"policy {MODEL} min_accuracy=")["min_accuracy"] is None
        assert on_daemon.json(f"policy {MODEL}")["canary"] == "act"
        code, _, err = on_daemon.run(f"policy {MODEL} accuracy=1")
        assert (code, "a policy has no accuracy" in err) == (2, True)
        assert on_daemon.json(f"policy {MODEL} requires_validation=false min_accuracy=-1 max_latency_p99_ms=none")

    def test_wrong_value_of_a_policy_is_refused_by_its_key(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        before = on_daemon.json(f"policy {MODEL}")
        for setting, problem in (
            ("canary=maybe", "must be one of off, advise, act, got 'maybe'"),
            ("min_accuracy=abc", "must be a number or none, got 'abc'"),
            ("min_accuracy=true", "must be a number or none, got True"),
            ("max_latency_p99_ms=nan", "must be a number or none, got 'nan'"),
            ("evidence_max_age_s=none", "must be a number, got None"),
            ("evidence_max_age_s=30d", "must be a number, got '30d'"),
            ("rollback_threshold=high", "must be a number, got 'high'"),
            ("requires_validation=no", "must be true or false, got 'no'"),
            ("requires_validation=0", "must be true or false, got 0"),
        ):
            code, _, err = on_daemon.run(f"policy {MODEL} {setting}")
            key, said = setting.partition("=")[0], " ".join(err.split())
            assert (code, f"{key} {problem}" in said) == (2, True), said
            assert f"`{key}=` restores the default" in said
        assert on_daemon.json(f"policy {MODEL}") == before

    def test_version_in_use_is_not_deleted(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        assert "cannot be deleted: it is production" in on_daemon.refused(f"rm {MODEL}@1.0.0")

    def test_version_registered_by_mistake_is_deleted_with_a_reason(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        assert "`forgectl models rm resnet@1.0.0 --reason REASON`" in on_daemon.refused(f"rm {MODEL}@1.0.0")
        on_daemon.lines(f"rm {MODEL}@1.0.0 --reason 'wrong files'")
        assert on_daemon.json("ls") == {"models": []}

    def test_validation_of_a_retired_version_hints_at_no_promotion(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.serve("1.0.0")
        on_daemon.lines(f"transition {MODEL}@1.0.0 deprecated --reason 'the end'")
        [said] = on_daemon.lines(f"validate {MODEL}@1.0.0 --accuracy 0.9")
        assert "promote" not in said


class TestFiles:
    def test_sound_files_are_verified_and_reported(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        [said] = on_daemon.lines(f"verify {MODEL}")
        assert re.fullmatch(r"resnet@1.0.0 is sound, 13 B compared in .*", said)
        assert fields_of(on_daemon.lines(f"show {MODEL}"))["verified"].startswith("sound, ")

    def test_damaged_files_block_the_promotion_until_they_are_sound(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        on_daemon.promote("1.0.0")
        on_daemon.validate("1.0.0")
        file = on_daemon.folder / "weights 1.0.0.onnx"
        file.write_text("weights 1.0.1")
        code, out, _ = on_daemon.run(f"verify {MODEL}")
        assert (code, out.startswith("resnet@1.0.0 is damaged, ")) == (1, True)
        assert "its files are damaged" in on_daemon.refused(f"promote {MODEL}@1.0.0")
        assert "nothing was copied" in on_daemon.run(f"pull {MODEL}")[2]
        file.write_text("weights 1.0.0")
        on_daemon.lines(f"verify {MODEL}")
        on_daemon.lines(f"promote {MODEL}@1.0.0")

    def test_missing_files_are_reported_where_their_folder_is(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        (on_daemon.folder / "weights 1.0.0.onnx").rename(on_daemon.folder / "moved")
        assert on_daemon.run(f"verify {MODEL}")[0] == 1
        assert fields_of(on_daemon.lines(f"show {MODEL}"))["verified"].startswith("missing, ")
        on_daemon.lines(f"verify {MODEL} --location {on_daemon.folder}/moved")
        assert fields_of(on_daemon.lines(f"show {MODEL}"))["verified"].startswith("missing, ")

    def test_unreachable_files_are_not_reported(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        on_daemon.folder.rename(on_daemon.folder.with_name("unmounted"))
        code, _, err = on_daemon.run(f"verify {MODEL}")
        assert (code, "does not exist on this host" in err) == (4, True)
        assert fields_of(on_daemon.lines(f"show {MODEL}"))["verified"] == "never"

    def test_files_are_pulled(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.register("1.0.0")
        [said] = on_daemon.lines(f"pull {MODEL}@1.0.0")
        assert said.startswith("weights 1.0.0.onnx: resnet@1.0.0, 13 B, verified, written in ")
        assert Path("weights 1.0.0.onnx").read_text() == "weights 1.0.0"
        assert "exists already" in on_daemon.refused(f"pull {MODEL}@1.0.0")
        assert on_daemon.json(f"pull {MODEL} copy.onnx")["target"] == "copy.onnx"

    def test_checkpoint_is_pulled_as_safetensors(self, on_daemon: RegistryDaemon) -> None:
        forged.checkpoint.save(on_daemon.folder / "step-7", {"w": np.zeros(8), "note": "x"}, step=7)
        on_daemon.client.register_model(MODEL, checkpoint=on_daemon.folder / "step-7")
        lines = on_daemon.lines(f"pull {MODEL}")
        assert lines[0].startswith("resnet-0.1.0.safetensors: resnet@0.1.0, ")
        assert lines[1] == "  left out (not arrays): note"

    def test_version_without_files_cannot_be_pulled(self, on_daemon: RegistryDaemon) -> None:
        on_daemon.client.register_model(MODEL, checksum="x")
        assert "does not know the files of resnet@0.1.0" in on_daemon.refused(f"pull {MODEL}")


class TestImport:
    def test_versions_are_imported_in_their_states(self, on_daemon: RegistryDaemon, tmp_path: Path) -> None:
        serving = {"model_id": "resnet", "version": "1.2.0", "state": "production", "checksum": "sha256:00"}
        older = {"model_id": "resnet", "version": "1.1.0", "state": "deprecated", "checksum": "sha256:11"}
        measured = {"passed": True, "latency_p50_ms": 1, "latency_p99_ms": 2, "accuracy_score": 0.5}
        versions = [{"metadata": serving, "aliases": ["serving"], "validation": measured}, {"metadata": older}]
        (tmp_path / "models.json").write_text(json.dumps({"versions": versions}))
        said = on_daemon.lines(f"import {tmp_path}/models.json --dry-run")
        assert said == ["would import 2 versions: resnet@1.2.0, resnet@1.1.0"]
        assert on_daemon.json("ls") == {"models": []}
        on_daemon.lines(f"import {tmp_path}/models.json --reason 'from the old registry'")
        assert fields_of(on_daemon.lines(f"show {MODEL}@serving"))["version"] == "1.2.0"
        assert on_daemon.lines(f"import {tmp_path}/models.json") == [
            "known before: 2 versions: resnet@1.2.0, resnet@1.1.0"
        ]

    def test_import_tells_what_serves_instead_of_another_version(
        self, on_daemon: RegistryDaemon, tmp_path: Path
    ) -> None:
        on_daemon.serve("1.0.0")
        metadata = {"model_id": "resnet", "version": "2.0.0", "state": "production", "checksum": "sha256:00"}
        (tmp_path / "models.json").write_text(json.dumps([{"metadata": metadata, "aliases": ["serving"]}]))
        assert on_daemon.lines(f"import {tmp_path}/models.json --dry-run") == [
            "would import 1 version: resnet@2.0.0",
            "would serve: resnet@2.0.0 instead of 1.0.0",
        ]
        assert fields_of(on_daemon.lines(f"show {MODEL}@serving"))["version"] == "1.0.0"
        assert on_daemon.lines(f"import {tmp_path}/models.json") == [
            "imported 1 version: resnet@2.0.0",
            "serves now: resnet@2.0.0 instead of 1.0.0",
        ]
        assert on_daemon.json(f"import {tmp_path}/models.json")["serving"] == []

    def test_refused_version_is_told_and_fails_the_command(self, on_daemon: RegistryDaemon, tmp_path: Path) -> None:
        metadata = {"model_id": "resnet", "version": "1.2.0", "state": "staging", "checksum": "x"}
        (tmp_path / "models.json").write_text(json.dumps([{"metadata": metadata, "aliases": ["serving"]}]))
        code, out, _ = on_daemon.run(f"import {tmp_path}/models.json")
        assert (code, out.startswith("refused: resnet@1.2.0: ")) == (1, True)

    @pytest.mark.parametrize("text", ["{", "3", '{"versions": [{"metadata": {"model_id": "a"}}]}', "[1]"])
    def test_file_of_another_form_is_refused(self, on_daemon: RegistryDaemon, tmp_path: Path, text: str) -> None:
        (tmp_path / "models.json").write_text(text)
        code, _, err = on_daemon.run(f"import {tmp_path}/models.json")
        assert (code, 'write {"versions": ' in err) == (2, True)


class TestCompletion:
    def offered(self, on_daemon: RegistryDaemon, *typed: str) -> list[str]:
        line = ["--socket", on_daemon.daemon.socket, "models", *typed]
        return [word for word, _ in candidates.candidates(main._parser(), line)]

    def test_models_and_their_versions_are_offered(
        self, on_daemon: RegistryDaemon, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(candidates, "DAEMON_TIMEOUT_S", 30.0)
        on_daemon.serve("1.0.0")
        on_daemon.register("1.1.0")
        on_daemon.client.register_model("bert", checksum="x")
        assert self.offered(on_daemon, "versions", "") == ["bert", "resnet"]
        assert self.offered(on_daemon, "show", "r") == ["resnet@"]
        assert self.offered(on_daemon, "show", "resnet@") == [
            "resnet@latest", "resnet@serving", "resnet@1.1.0", "resnet@1.0.0",
        ]  # fmt: skip
        assert self.offered(on_daemon, "show", "nothing@") == []
        assert self.offered(on_daemon, "transition", "resnet@1.0.0", "dep") == ["deprecated"]


def test_following_history_shows_new_facts(on_daemon: RegistryDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    from forged.cli.models import history

    on_daemon.register("1.0.0")

    def one_more(options: Options, read: Callable[[PlainConnection], Iterator[Row]]) -> list[Row]:
        on_daemon.promote("1.0.0")
        on_daemon.client.register_model("bert", checksum="x")
        with DaemonConnection(options) as daemon:
            return [next(read(daemon))]

    monkeypatch.setattr(history, "over_restarts", one_more)
    *past, fact = on_daemon.lines(f"history {MODEL} --follow --json")
    assert json.loads(past[0])["entries"][0]["kind"] == "registered"
    assert json.loads(fact)["type"] == "ModelTransitioned"
