"""Messages of `slora` for wrong arguments. Subcommands are tested together with the server part that they call."""

import pytest

from slora_api.cli.main import main


def test_arguments_that_a_subcommand_does_not_know_are_answered_with_its_own_usage(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["adapter", "push", "shout", "./my-adapter"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert "usage: slora adapter push" in told and "--name NAME" in told
    assert "unrecognized arguments: ./my-adapter" in told
