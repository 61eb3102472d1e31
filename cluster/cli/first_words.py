"""What a service that is ready suggests to ask it."""

from __future__ import annotations

QUESTION = "Why is the sky blue?"
SECURED = "  callers say who they are: see Security in `graphpool chat --help`"


def suggestion(address: str, *, has_tokenizer: bool, has_chat_template: bool) -> list[str]:
    """Command lines that the model can answer, and what it cannot and why, in console markup."""
    ask = f"graphpool {{}} --address {address}"
    if not has_tokenizer:
        return [
            "  [yellow]the model has no tokenizer.json: it takes and gives token ids alone[/]",
            f"  try:  {ask.format('generate')} --token-ids 1,2,3 -n 16",
        ]
    if not has_chat_template:
        return [
            "  [yellow]the model has no chat template: it continues texts and takes no messages[/]",
            f'  try:  {ask.format("generate")} -n 16 "Once upon a time"',
        ]
    return [f'  try:  {ask.format("chat")} "{QUESTION}"']
