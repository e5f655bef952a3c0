"""`scalerl plan | simulate` as a user types them."""

import json
from pathlib import Path

import pytest

from flows import cli
from tests.synthetic_run import write_run


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = cli.run(list(arguments))
    out, err = capsys.readouterr()
    return code, out, err


SMALL = ("--set", "training.prompts_per_step=8", "--set", "training.activation_checkpointing=true")


def test_the_plan_shows_placement_memory_and_bottleneck(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(
        capsys, "plan", "scalerl", "--devices", "24xH100", "--generators", "16", "--trainers", "8", *SMALL, "--json"
    )
    record = json.loads(out)
    assert code == 0
    assert record["placement"][:2] == ["hosts 0-1: generators 0-15", "host 2: trainer ranks 0-7"]
    assert record["trainer_bytes"]["total"] < record["usable_bytes"]
    assert record["model"]["parameters"] == 8_030_261_248
    assert record["simulated"]["bottleneck"] == record["limits"]["step"]


def test_what_cannot_fit_is_one_line_and_exit_code_two(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "plan", "scalerl", "--model", "70B", "--devices", "80xH100", "--generators", "64")
    assert (code, out) == (2, "")
    assert err.startswith("scalerl: generator: 70B needs") and "would fit" in err and err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("plan", "scalerl", "--devices", "80xGB20"), "did you mean GB200"),
        (("plan", "scalerl", "--target", "0.6"), "--target and --fit belong together"),
        (("simulate", "tiny", "--devices", "4"), "--generator-rate and --trainer-rate"),
        (("simulate", "tiny", "--on", "GB200", "--split", "3"), "GENERATORS:TRAINERS"),
    ],
)
def test_misuse_is_told(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], message: str) -> None:
    code, _, err = said(capsys, *arguments)
    assert code == 2
    assert message in err


def test_given_rates_find_the_balanced_split(capsys: pytest.CaptureFixture[str]) -> None:
    """Generators of 1,000 tokens/s and trainers of 3,000: of 4 devices one trains."""
    code, out, _ = said(
        capsys, "simulate", "tiny", "--devices", "4", "--generator-rate", "1000", "--trainer-rate", "3000",
        "--length-distribution", "constant:20", "--push-s", "0", "--set", "training.prompts_per_step=4", "--json",
    )  # fmt: skip
    record = json.loads(out)
    assert code == 0
    assert (record["best"]["generators"], record["best"]["trainers"]) == (3, 1)
    assert record["best"]["step_s"] == pytest.approx(4 * 16 * 20 / 3000, rel=0.05)
    assert len(record["tried"]) == 3


def test_rates_of_a_run_come_from_its_rows(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of a run whose generators made 2,000 tokens/s and whose trainer took 10 s for 4 x 16 x 20 tokens, reading prompts of 10 and four times one completion of 16.

    By the square root of the group's size: a group of 4 is read as 10 + 2 x 19 tokens, 48 / 4 of them a trace instead of 86 / 16.
    """
    from datetime import UTC, datetime

    from scalerl.recipe import load
    from warehouse.writer import append

    monkeypatch.setenv("SCALERL_HOME", str(tmp_path))
    recipe = load("tiny", ["training.prompts_per_step=4", "training.steps=30", "training.stage_steps=30"])
    now = datetime.now(UTC)
    run = {"recipe_name": "tiny", "recipe": recipe.model_dump_json(), "source": "scalerl", "created_at": now}
    append(tmp_path / "warehouse", "runs", recipe.run_id, [run])
    tokens = 4 * 16 * 20
    rows = [
        {
            "attempt": 1, "step": step, "at": now, "updated": True, "seconds": 10.0, "generator_busy_s": tokens / 2000, "trainer_busy_s": 10.0,
            "tokens_generated": tokens, "tokens_trained": tokens, "trace_tokens_mean": 20.0, "zero_variance_share": 0.0,
            "groups_trained": 4, "traces_trained": 4 * 16, "tokens_read": 4 * (10 + 4 * 19),
        }
        for step in range(1, 31)
    ]  # fmt: skip
    append(tmp_path / "warehouse", "train_steps", recipe.run_id, rows)
    code, out, err = said(capsys, "simulate", recipe.run_id, "--json")
    assert code == 0, err
    best = json.loads(out)["best"]
    assert best["step_s"] == pytest.approx(10, rel=0.02)
    assert best["bottleneck"] == "trainer"
    assert best["generator_busy_s"] == pytest.approx(tokens / 2000, rel=0.05)
    code, out, err = said(capsys, "simulate", recipe.run_id, "--split", "1:4", "--json")
    assert json.loads(out)["best"]["step_s"] == pytest.approx(2.5, rel=0.05), err
    prompts = [
        {"step": 9, "kind": "train", "prompt_id": "p", "sample": 0, "tokens": [1] * 20, "prompt_tokens": [1] * 10}
    ]
    append(tmp_path / "warehouse", "traces", recipe.run_id, [row | {"attempt": 1} for row in prompts])
    code, out, err = said(capsys, "simulate", recipe.run_id, "--set", "rollout.group_size=4", "--json")
    assert json.loads(out)["best"]["trainer_busy_s"] == pytest.approx(10 / 4 * (48 / 4) / (86 / 16), rel=0.05), err


COMMIT = "0123456789abcdef0123456789abcdef01234567"
# A decoder of two layers, width 8, MLP 16, tied: 2 x (4 x 64 + 3 x 128 + 16) + 50 x 8 + 8 parameters.
CONFIG = {
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 16,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "vocab_size": 50,
    "tie_word_embeddings": True,
}


def test_a_run_too_short_for_rates_is_told_which_steps_count(
    capsys: pytest.CaptureFixture[str], scalerl_home: Path
) -> None:
    """PipelineRL-4 starts up for k + 2 = 6 steps; of eight, two are left."""
    run = write_run(scalerl_home / "warehouse", steps=8)
    code, out, err = said(capsys, "simulate", run)
    assert (code, out) == (2, "") and err.count("\n") == 1
    assert f"run {run}: 2 of its steps can be timed, at least 5 are needed" in err and "after step 6" in err


def test_a_model_is_planned_by_its_hub_name(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the config.json is needed, and where it is cached no network."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    snapshot = tmp_path / "models--someone--model" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text(json.dumps(CONFIG))
    by_recipe = ("--set", "model.path=someone/model", "--set", f"model.revision={COMMIT}")
    for named in (("--model", f"someone/model@{COMMIT}"), by_recipe):
        code, out, err = said(capsys, "plan", "scalerl", "--devices", "8xH100", *named, *SMALL, "--json")
        assert code == 0, err
        model = json.loads(out)["model"]
        assert (model["name"], model["parameters"]) == ("someone/model", 2 * (256 + 384 + 16) + 400 + 8)
    code, _, err = said(capsys, "plan", "scalerl", "--model", "someone/other", "--devices", "8xH100")
    assert code == 2 and err.count("\n") == 1
    assert "where there is a network run: hf download someone/other config.json" in err
