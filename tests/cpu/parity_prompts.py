"""Forty prompts of different kinds: questions, stories, code, numbers, lists, other scripts, one token, a long one."""

from __future__ import annotations

TEXTS: tuple[str, ...] = (
    "The capital of France is",
    "Once upon a time, in a village by the sea, there lived",
    "def fibonacci(n):\n    ",
    "Q: What is the boiling point of water at sea level?\nA:",
    "1, 1, 2, 3, 5, 8, 13,",
    "In 1969, Neil Armstrong",
    "The three primary colors are",
    "Dear Sir or Madam,\n\nI am writing to",
    "import numpy as np\n\nx = np.",
    "The mitochondria is",
    "Water is made of hydrogen and",
    "SELECT name, age FROM users WHERE",
    "To make a cup of tea, first",
    "Shakespeare wrote",
    "La capitale de l'Italie est",
    "Der schnelle braune Fuchs",
    "El perro y el gato",
    "日本の首都は",
    "Привет, как",
    "🙂 means happy and 🙁 means",
    "<html>\n<body>\n<h1>",
    "for (int i = 0; i < 10; i++) {",
    "The quick brown fox jumps over the lazy dog. The quick brown fox",
    "A list of fruits:\n- apple\n- banana\n-",
    "3.14159265358979",
    "1234567890 + 9876543210 =",
    "The opposite of hot is cold. The opposite of up is",
    "She sells sea shells",
    "According to the theory of relativity,",
    '{"name": "Ada", "born": 1815, "occupation": "',
    "# A short history of computing\n\n",
    "Hello",
    "The",
    "   ",
    "Photosynthesis is the process by which " * 6,
    "Monday, Tuesday, Wednesday,",
)

CHATS: tuple[str, ...] = (
    "What is gravity?",
    "Write a haiku about autumn.",
    "Explain recursion to a child in two sentences.",
    "List five uses of a paperclip.",
)
