"""REF: the same weights in plain `transformers`, fp32, greedy, one request at a time."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

# 40 prompts: everyday questions, code, CJK and other scripts, and some that span more than one prefill chunk.
QUESTIONS = [
    "What is the capital of France?",
    "Name three colours.",
    "Why is the sky blue?",
    "Write a haiku about rivers.",
    "What is 17 + 25?",
    "Who wrote Hamlet?",
    "Translate 'good morning' to Spanish.",
    "List the planets.",
    "What does HTTP stand for?",
    "Explain gravity to a child.",
    "What is a prime number?",
    "Give me a recipe for tea.",
    "How many legs has a spider?",
    "What is the boiling point of water?",
]
RAW = [
    "def fibonacci(n):\n    ",
    "import numpy as np\n\ndef softmax(x):\n",
    "#include <stdio.h>\n\nint main(void) {\n",
    "SELECT name, count(*) FROM users",
    "function add(a, b) {\n  return",
    "class Stack:\n    def __init__(self):\n",
    "for i in range(10):\n    print(",
    '{"name": "Ada", "age": ',
    "你好,世界。今天的天气",
    "東京は日本の",
    "안녕하세요. 오늘은",
    "Привет, как",
    "مرحبا بالعالم",
    "Once upon a time",
    "The quick brown fox",
    "1, 2, 3, 4, 5,",
    "A\n\nB\n\nC\n\n",
    "   leading spaces",
    "🔥🔥🔥",
    "x",
]
LONG = [
    " ".join(f"Item {i} costs {i * 7 % 50} coins." for i in range(60)) + " The cheapest item",
    " ".join(f"def f{i}(x): return x + {i}" for i in range(70)) + "\n",
    "The river runs to the sea. " * 110 + "And then",
    "中文和English混合的文本。" * 70,
    " ".join(str(i * i) for i in range(260)),
    "\n".join(f"{i}. Step number {i} of the long procedure." for i in range(1, 80)),
]


class Reference:
    """Greedy continuations by transformers."""

    def __init__(self, directory: Path) -> None:
        torch.set_num_threads(1)  # the pipeline under test has the other core
        self.tokenizer = AutoTokenizer.from_pretrained(directory)
        self._model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()

    def prompts(self) -> list[list[int]]:
        """The 40 prompts as token ids."""
        chats = [
            self.tokenizer.apply_chat_template(
                [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=False
            )
            for q in QUESTIONS
        ]
        return chats + [self.tokenizer(text)["input_ids"] for text in RAW + LONG]

    def greedy(self, prompt: list[int], max_tokens: int) -> list[int]:
        """The generated ids, an end-of-sequence token included."""
        with torch.inference_mode():
            ids = self._model.generate(
                torch.tensor([prompt]),
                attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
                max_new_tokens=max_tokens,
                do_sample=False,
                temperature=None,
                top_p=None,
                top_k=None,
            )
        return ids[0, len(prompt) :].tolist()

    def gaps(self, prompt: list[int], generated: list[int]) -> list[float]:
        """By how much each generated token's logit is above the second best."""
        with torch.inference_mode():
            logits = self._model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1]
        best = logits.topk(2).values
        return (best[:, 0] - best[:, 1]).tolist()
