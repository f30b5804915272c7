// LangChain.js: its model for chat completions, which also speaks the Responses API, and its other models.

const { ChatOpenAI, OpenAI, OpenAIEmbeddings } = require("@langchain/openai");
const { HumanMessage } = require("@langchain/core/messages");
const { tool } = require("@langchain/core/tools");
const { z } = require("zod");
const { KEY, MESSAGES, QUESTION, main } = require("./calls.cjs");

const Order = z.strictObject({ fruit: z.enum(["apple", "pear"]), amount: z.int().min(1).max(9) });
const WAYS = { chat: false, responses: true };

function tiny(servers, options = {}) {
  const common = { model: "tiny", apiKey: KEY, temperature: 0, maxRetries: 0, maxTokens: 200 };
  return new ChatOpenAI({ ...common, configuration: { baseURL: servers.tiny }, ...options });
}

async function by_each_way(servers, use) {
  const results = {};
  for (const [name, useResponsesApi] of Object.entries(WAYS)) results[name] = await use({ useResponsesApi });
  return results;
}

async function invoked(servers) {
  return by_each_way(servers, async (way) => {
    const { text, usage_metadata: usage } = await tiny(servers, way).invoke(MESSAGES);
    return { text, total: usage.total_tokens };
  });
}

async function streamed(servers) {
  return by_each_way(servers, async (way) => {
    let whole;
    let count = 0;
    for await (const chunk of await tiny(servers, way).stream(MESSAGES)) {
      whole = whole === undefined ? chunk : whole.concat(chunk);
      count += 1;
    }
    return { text: whole.text, total: whole.usage_metadata.total_tokens, several: count > 2 };
  });
}

async function structured(servers) {
  const results = {};
  for (const method of ["jsonSchema", "functionCalling"]) {
    results[method] = await tiny(servers).withStructuredOutput(Order, { method }).invoke(MESSAGES);
  }
  return results;
}

/** The model calls a tool, and answers with what it gave. */
async function tools_loop(servers) {
  const configuration = { baseURL: servers.tools };
  return by_each_way(servers, async (way) => {
    const weather = tool(async ({ city }) => `21 degrees in ${city}`, {
      name: "get_weather",
      description: "The weather in a city.",
      schema: z.object({ city: z.string() }),
    });
    const model = tiny(servers, { model: "scripted", configuration, ...way }).bindTools([weather]);
    const asked = [new HumanMessage(QUESTION)];
    const answer = await model.invoke(asked);
    const results = await Promise.all(answer.tool_calls.map((call) => weather.invoke(call)));
    return (await model.invoke([...asked, answer, ...results])).text;
  });
}

async function weighed(servers) {
  const { response_metadata: metadata } = await tiny(servers, { logprobs: true, topLogprobs: 2 }).invoke(MESSAGES);
  return metadata.logprobs.content.map((token) => token.token).join("");
}

async function embedded(servers) {
  const configuration = { baseURL: servers.tiny };
  const vectors = await new OpenAIEmbeddings({ model: "tiny", apiKey: KEY, configuration }).embedDocuments(["a", "b"]);
  return vectors.map((vector) => vector.length);
}

async function prompted(servers) {
  const configuration = { baseURL: servers.tiny };
  const options = { model: "tiny", apiKey: KEY, temperature: 0, maxTokens: 4, configuration };
  return new OpenAI(options).invoke("The capital of France is");
}

main(invoked, streamed, structured, tools_loop, weighed, embedded, prompted);
