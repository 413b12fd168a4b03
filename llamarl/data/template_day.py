"""The day that a chat template says when it asks for today's, fixed.

Owns: the function `strftime_now` of such a template. Does not own: which day that is
(`recipe/chat_templates.py`), or rendering (`tokenizer.py`). Invariant: but for the day, a template
renders what it would.
"""

import string
from datetime import datetime

TODAY = "strftime_now"  # by which a template says the day
PERCENT = "\ufdd1"  # of no character: it stands for %% while directives are replaced


def on_day(template: str, day: str) -> str:
    """The template with a `strftime_now` of its own, in which it is always the beginning of this
    day (ISO). transformers gives templates no function of the caller's."""
    start = datetime.fromisoformat(day)
    directives = [f"%{flag}{each}" for flag in ("", "-") for each in string.ascii_letters]
    texts = {each: start.strftime(each) for each in directives}
    texts = {"%%": PERCENT} | {key: text for key, text in texts.items() if text != key}
    pairs = [*texts.items(), (PERCENT, "%")]
    steps = "".join(f"|replace({key!r}, {text!r})" for key, text in pairs)
    macro = f"{{%- macro {TODAY}(format) -%}}{{{{- format{steps} -}}}}{{%- endmacro %}}"
    return f"{macro}\n{template}"  # the template begins a line, as before; Jinja drops the break
