"""An agent with LangGraph."""

import os
import sys

from langchain_core.tools import tool
from langchain_openai import ChatOpenAI
from langgraph.graph import START, MessagesState, StateGraph
from langgraph.prebuilt import ToolNode, tools_condition


@tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


model = ChatOpenAI(model=os.environ["OPENAI_MODEL"]).bind_tools([add])
graph = StateGraph(MessagesState)
graph.add_node("model", lambda state: {"messages": [model.invoke(state["messages"])]})
graph.add_node("tools", ToolNode([add]))
graph.add_edge(START, "model")
graph.add_conditional_edges("model", tools_condition)
graph.add_edge("tools", "model")
state = graph.compile().invoke({"messages": [("system", "Use the tool."), ("user", sys.argv[1])]})
print(state["messages"][-1].content)
