"""Tables of the reports are whole, however long a name in them is."""

from __future__ import annotations

import pytest

from llamarl.cli.graph import WIDTH, render, whole_words


@pytest.mark.parametrize("num_folders", [1, 4, 30])
def test_a_path_is_never_cut_and_lists_are_wrapped_between_words(num_folders: int) -> None:
    path = "../runs/sft_llama" * num_folders + "/export"
    columns = "prompt_ids response_ids generator_logprobs token_versions sampling"
    rows = [["infer", f"{path} (frozen)", columns], ["score", "scorer", ""]]
    text = render(["before", whole_words(("stage", "run by", "reads"), rows, 26)])
    for word in (*columns.split(), path, "(frozen)", "run by", "scorer"):
        assert any(word in line for line in text.splitlines()), word
    if num_folders == 1:
        assert max(map(len, text.splitlines())) <= WIDTH


def test_a_cell_without_words_is_an_empty_one() -> None:
    assert render([whole_words(("a", "b"), [["", "x"], ["y", ""]], 5)]) == "a  b\n   x\ny\n"
