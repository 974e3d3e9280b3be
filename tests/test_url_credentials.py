"""Credentials of URLs are in no message, and in nothing that a command records."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from eagle_plugin.common.errors import UserError
from eagle_plugin.common.url_credentials import without_credentials, without_credentials_in
from eagle_plugin.learning.data.generate import main as generate
from eagle_plugin.learning.data.rows import DataError
from eagle_plugin.learning.data.sources.prompts import Prompt, format_prompt
from eagle_plugin.learning.data.store.objects import open_folder
from eagle_plugin.learning.data.verify import main as verify
from eagle_plugin.learning.deploy.counts import served_counts
from eagle_plugin.learning.jobs.job_watch import JobWatch
from eagle_plugin.learning.jobs.jobs_folder import JobsFolder
from eagle_plugin.learning.jobs.lineage import Lineage
from eagle_plugin.learning.jobs.recipe import JobRecipe

SECRET = "tr4nquil"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        (f"http://ann:{SECRET}@host:1/x is down", "http://***@host:1/x is down"),
        (f"s3://key:{SECRET}@bucket/a and s3://bucket/b@c", "s3://***@bucket/a and s3://bucket/b@c"),
        (f"https://{SECRET}@host", "https://***@host"),
        (f"'http://ann:p@{SECRET}@host'", "'http://***@host'"),
        (
            f"https://host/a?sp=r&sig={SECRET}&X-Amz-Signature={SECRET}",
            "https://host/a?sp=r&sig=***&X-Amz-Signature=***",
        ),
        ("https://host/@user, c@d.de, a://b and no secret", "https://host/@user, c@d.de, a://b and no secret"),
    ],
)
def test_only_the_credentials_are_hidden(text: str, shown: str) -> None:
    assert without_credentials(text) == shown == str(UserError(text))
    assert without_credentials_in({"a": [text, 1]}) == {"a": [shown, 1]}


@pytest.mark.parametrize("scheme", ["memory", "s3", "http"])
def test_a_folder_shows_its_url_without_them(scheme: str) -> None:
    assert open_folder(f"{scheme}://ann:{SECRET}@127.0.0.1:9/x").url == f"{scheme}://***@127.0.0.1:9/x"


@pytest.mark.parametrize("command", [verify, lambda argv: served_counts(argv[0])], ids=["verify", "watch"])
def test_a_message_about_a_server_has_none(command, capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(UserError) as error:
        command([f"http://ann:{SECRET}@127.0.0.1:9/x"])
    assert "http://***@127.0.0.1:9/x" in str(error.value)
    assert SECRET not in str(error.value) + "".join(capfd.readouterr())


def test_an_endpoint_that_is_left_out_is_named_without_them(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    prompts = tmp_path / "p"
    prompts.write_text(format_prompt(Prompt("p", "test", messages=[{"role": "user", "content": "Hi"}])))
    with pytest.raises(DataError) as error:
        generate([str(prompts), "--endpoint", f"http://ann:{SECRET}@127.0.0.1:9/v1", "--out", str(tmp_path / "r")])
    printed = "".join(capfd.readouterr())
    assert "http://***@127.0.0.1:9/v1" in printed and "http://***@" in str(error.value)
    assert SECRET not in printed + str(error.value)


def test_the_status_and_the_lineage_of_a_job_have_none(tmp_path: Path) -> None:
    jobs = JobsFolder(str(tmp_path))
    watch = JobWatch(jobs, "j", None, Console(quiet=True))
    watch.begin(["train"], tmp_path / "progress.json")
    watch.end("failed", f"http://ann:{SECRET}@host is down")
    assert jobs.status("j").message == "http://***@host is down"
    asked = {"endpoints": [f"http://ann:{SECRET}@host"]}
    job = JobRecipe.model_validate({"target": "t", "generate": asked, "train": {"a": {}}})
    lineage = Lineage(tmp_path / "lineage.json", job, tmp_path / "t", tmp_path, tmp_path)
    assert lineage._record["recipe"]["generate"]["endpoints"] == ["http://***@host"]
