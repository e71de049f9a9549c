"""Answer a question from a collection, by any language model that speaks OpenAI's chat API.

python examples/rag_answer.py handbook "how do I reset a password"                      prints the prompt
python examples/rag_answer.py handbook "how do I reset a password" \
        --endpoint http://127.0.0.1:11434/v1 --model llama3.2                               prints the answer
"""

from __future__ import annotations

import argparse
import os

import cairn
import httpx2


def build_prompt(collection: cairn.Collection, question: str, max_characters: int = 6_000) -> str:
    """Return the question with the passages that answer it best, numbered for citations."""
    answer = collection.search(question, max_characters=max_characters)
    sources = [
        f"[{number}] {hit.title or hit.doc_id}\n" + "\n…\n".join(passage.text for passage in hit.passages)
        for number, hit in enumerate(answer.hits, start=1)
    ]
    task = "Answer the question from these sources alone, and cite them like [1]."
    return "\n\n".join([task, *sources, f"Question: {question}"])


def complete(prompt: str, endpoint: str, model: str) -> str:
    """Return what the language model says."""
    headers = {"Authorization": f"Bearer {os.environ.get('OPENAI_API_KEY', 'none')}"}
    body = {"model": model, "messages": [{"role": "user", "content": prompt}]}
    reply = httpx2.post(f"{endpoint}/chat/completions", json=body, headers=headers, timeout=120.0)
    return reply.raise_for_status().json()["choices"][0]["message"]["content"]


def main() -> None:
    """Print an answer, or the prompt where no endpoint is given."""
    parser = argparse.ArgumentParser()
    parser.add_argument("collection")
    parser.add_argument("question")
    parser.add_argument("--endpoint")
    parser.add_argument("--model", default="default")
    asked = parser.parse_args()
    prompt = build_prompt(cairn.open_collection(asked.collection), asked.question)
    print(complete(prompt, asked.endpoint, asked.model) if asked.endpoint else prompt)


if __name__ == "__main__":
    main()
