"""The day that a chat template says when it asks for today's, fixed.

Owns: the function `strftime_now` of such a template. Does not own: which day that is
(`recipe/chat_templates.py`), or rendering (`tokenizer.py`). Invariant: but for the day, a template
renders what it would.
"""

from datetime import datetime

TODAY = "strftime_now"  # by which a template says the day
DIRECTIVES = "aAwdbBmyYHIMSfpjUWVuGcxX"  # those without a time zone, which there is none of
UNPADDED = "dmHIMSj"  # glibc also knows %-d


def on_day(template: str, day: str) -> str:
    """The template with a `strftime_now` of its own, in which it is always the beginning of this
    day (ISO). transformers gives templates no function of the caller's."""
    start = datetime.fromisoformat(day)
    texts = {f"%{each}": start.strftime(f"%{each}") for each in DIRECTIVES}
    texts |= {f"%-{each}": start.strftime(f"%{each}").lstrip("0") or "0" for each in UNPADDED}
    steps = "".join(f"|replace({key!r}, {text!r})" for key, text in {**texts, "%%": "%"}.items())
    macro = f"{{%- macro {TODAY}(format) -%}}{{{{- format{steps} -}}}}{{%- endmacro %}}"
    return f"{macro}\n{template}"  # the template begins a line, as before; Jinja drops the break
