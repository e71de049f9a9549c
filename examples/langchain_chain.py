"""A LangChain chain that answers from a collection, with any chat model of LangChain.

chain = answer_chain(cairn.open_collection("handbook"), ChatOllama(model="llama3.2"))
print(chain.invoke("how do I reset a password"))
"""

from __future__ import annotations

import cairn
from cairn.langchain import CairnRetriever
from langchain_core.documents import Document
from langchain_core.language_models import BaseChatModel
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_core.runnables import Runnable, RunnablePassthrough

PROMPT = ChatPromptTemplate.from_messages(
    [("system", "Answer from these passages alone:\n\n{passages}"), ("user", "{question}")]
)


def answer_chain(collection: cairn.Collection, model: BaseChatModel, k: int = 6) -> Runnable[str, str]:
    """Return a chain from a question to an answer."""
    retriever = CairnRetriever(collection=collection, k=k)
    asked = {"passages": retriever | _joined, "question": RunnablePassthrough()}
    return asked | PROMPT | model | StrOutputParser()


def _joined(documents: list[Document]) -> str:
    return "\n\n".join(f"{each.metadata['doc_id']}: {each.page_content}" for each in documents)
