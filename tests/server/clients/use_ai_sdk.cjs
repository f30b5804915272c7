// Vercel's AI SDK: its provider for compatible servers, and its provider for OpenAI, which speaks the Responses API.

const { createOpenAI } = require("@ai-sdk/openai");
const { createOpenAICompatible } = require("@ai-sdk/openai-compatible");
const { embedMany, generateText, Output, stepCountIs, streamText, tool } = require("ai");
const { z } = require("zod");
const { KEY, MESSAGES, QUESTION, main } = require("./calls.cjs");

const [{ content: system }, { content: prompt }] = MESSAGES;
const Order = z.strictObject({ fruit: z.enum(["apple", "pear"]), amount: z.int().min(1).max(9) });
const quick = { maxRetries: 0, temperature: 0 };

function compatible(baseURL, apiKey = KEY) {
  return createOpenAICompatible({
    name: "batchline",
    baseURL,
    apiKey,
    includeUsage: true,
    supportsStructuredOutputs: true,
  });
}

/** The three ways to a model: chat completions by either provider, and responses. */
const ways = (baseURL, model) => ({
  compatible: compatible(baseURL)(model),
  openai_chat: createOpenAI({ baseURL, apiKey: KEY }).chat(model),
  openai_responses: createOpenAI({ baseURL, apiKey: KEY })(model),
});

async function by_each_way(models, use) {
  const results = {};
  for (const [name, model] of Object.entries(models)) results[name] = await use(model);
  return results;
}

async function generated(servers) {
  return by_each_way(ways(servers.tiny, "tiny"), async (model) => {
    const { text, finishReason, usage } = await generateText({ model, system, prompt, ...quick });
    return { text, finishReason, total: usage.totalTokens };
  });
}

async function streamed(servers) {
  return by_each_way(ways(servers.tiny, "tiny"), async (model) => {
    const { textStream, usage } = streamText({ model, system, prompt, ...quick });
    const parts = [];
    for await (const part of textStream) parts.push(part);
    return { text: parts.join(""), total: (await usage).totalTokens, several: parts.length > 2 };
  });
}

async function structured(servers) {
  return by_each_way(ways(servers.tiny, "tiny"), async (model) => {
    const output = Output.object({ schema: Order });
    return (await generateText({ model, system, prompt, output, maxOutputTokens: 200, ...quick })).output;
  });
}

/** Objects as they fill up. */
async function streamed_object(servers) {
  const model = compatible(servers.tiny)("tiny");
  const output = Output.object({ schema: Order });
  const { partialOutputStream } = streamText({ model, system, prompt, output, maxOutputTokens: 200, ...quick });
  const parts = [];
  for await (const part of partialOutputStream) parts.push(part);
  return parts;
}

const weather = (calls) => ({
  get_weather: tool({
    description: "The weather in a city.",
    inputSchema: z.object({ city: z.string() }),
    execute: async ({ city }) => calls.push(city) && "21 degrees",
  }),
});

async function tools_loop(servers) {
  return by_each_way(ways(servers.tools, "scripted"), async (model) => {
    const calls = [];
    const options = { model, prompt: QUESTION, tools: weather(calls), stopWhen: stepCountIs(4), maxRetries: 0 };
    const whole = await generateText(options);
    const stream = await streamText(options).text;
    return { calls, answers: [whole.text, stream], steps: whole.steps.length };
  });
}

/** A call that is demanded of a model which would not make it by itself. */
async function demanded_call(servers) {
  const model = compatible(servers.tiny)("tiny");
  const tools = { order: tool({ inputSchema: Order }) };
  const options = { model, system, prompt, tools, maxOutputTokens: 100, ...quick };
  const first = async (toolChoice) => {
    const { toolName, input } = (await generateText({ ...options, toolChoice })).toolCalls[0];
    return [toolName, input];
  };
  return { required: await first("required"), named: await first({ type: "tool", toolName: "order" }) };
}

async function embedded(servers) {
  const models = {
    compatible: compatible(servers.tiny).embeddingModel("tiny"),
    openai: createOpenAI({ baseURL: servers.tiny, apiKey: KEY }).embedding("tiny"),
  };
  return by_each_way(models, async (model) => {
    const { embeddings, usage } = await embedMany({ model, values: ["one", "two"], maxRetries: 0 });
    return { lengths: embeddings.map((vector) => vector.length), has_usage: usage.tokens > 0 };
  });
}

async function completed(servers) {
  const model = compatible(servers.tiny).completionModel("tiny");
  return (await generateText({ model, prompt: "The capital of France is", maxOutputTokens: 4, ...quick })).text;
}

async function refused(servers) {
  const errors = [];
  for (const [model, options] of [
    [compatible(servers.tiny)("tiny"), { temperature: 9 }],
    [compatible(servers.tiny, "wrong")("tiny"), {}],
  ]) {
    try {
      await generateText({ model, prompt, maxRetries: 0, ...options });
    } catch (error) {
      errors.push([error.statusCode, error.message]);
    }
  }
  return errors;
}

main(
  ...[generated, streamed, structured, streamed_object],
  ...[tools_loop, demanded_call, embedded, completed, refused],
);
