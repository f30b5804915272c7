// Mistral's package for Node, with `serverURL` pointing elsewhere. It validates the answers' fields.

const { Mistral } = require("@mistralai/mistralai");
const { z } = require("zod");
const { KEY, MESSAGES, QUESTION, main } = require("./calls.cjs");

const Order = z.strictObject({ fruit: z.enum(["apple", "pear"]), amount: z.int().min(1).max(9) });
const client = (url, apiKey = KEY) =>
  new Mistral({ serverURL: url.slice(0, -"/v1".length), apiKey, retryConfig: { strategy: "none" } });
const asked = { model: "tiny", messages: MESSAGES, temperature: 0, maxTokens: 200 };
const WEATHER = {
  name: "get_weather",
  description: "The weather in a city.",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

async function completed(servers) {
  const { choices, usage } = await client(servers.tiny).chat.complete(asked);
  return [choices[0].message.content, choices[0].finishReason, usage.totalTokens];
}

async function streamed(servers) {
  const parts = [];
  let usage;
  for await (const { data } of await client(servers.tiny).chat.stream(asked)) {
    parts.push(data.choices[0]?.delta.content ?? "");
    usage = data.usage ?? usage;
  }
  return [parts.join(""), parts.length > 2];
}

async function seeded(servers) {
  const options = { ...asked, temperature: 1, randomSeed: 7 };
  const { chat } = client(servers.tiny);
  const texts = [await chat.complete(options), await chat.complete(options)].map((a) => a.choices[0].message.content);
  return texts[0] === texts[1];
}

async function parsed(servers) {
  const { choices } = await client(servers.tiny).chat.parse({ ...asked, responseFormat: Order });
  return choices[0].message.parsed;
}

async function tools_loop(servers) {
  const { chat } = client(servers.tools, "any");
  const tools = [{ type: "function", function: WEATHER }];
  const messages = [{ role: "user", content: QUESTION }];
  const { message } = (await chat.complete({ model: "scripted", messages, tools })).choices[0];
  const [call] = message.toolCalls;
  messages.push(message, { role: "tool", toolCallId: call.id, name: call.function.name, content: "21 degrees" });
  const answer = await chat.complete({ model: "scripted", messages, tools });
  return [call.function.name, JSON.parse(call.function.arguments), answer.choices[0].message.content];
}

async function embedded(servers) {
  const { data } = await client(servers.tiny).embeddings.create({ model: "tiny", inputs: ["one", "two"] });
  return data.map(({ embedding }) => embedding.length);
}

async function listed(servers) {
  return (await client(servers.tiny).models.list()).data.map(({ id }) => id);
}

async function refused(servers) {
  try {
    await client(servers.tiny, "wrong").chat.complete(asked);
    return null;
  } catch (error) {
    return error.statusCode;
  }
}

main(completed, streamed, seeded, parsed, tools_loop, embedded, listed, refused);
