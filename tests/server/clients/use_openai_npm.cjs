// OpenAI's own package for Node, with `baseURL` pointing elsewhere.

const fs = require("fs");
const os = require("os");
const path = require("path");
const OpenAI = require("openai");
const { zodResponseFormat } = require("openai/helpers/zod");
const { z } = require("zod");
const { KEY, MESSAGES, QUESTION, main } = require("./calls.cjs");

const Order = z.strictObject({ fruit: z.enum(["apple", "pear"]), amount: z.int().min(1).max(9) });

const tiny = (servers, apiKey = KEY) => new OpenAI({ baseURL: servers.tiny, apiKey, maxRetries: 0 });
const toTools = (servers) => new OpenAI({ baseURL: servers.tools, apiKey: "any", maxRetries: 0 });
const asked = { model: "tiny", messages: MESSAGES, temperature: 0 };

async function completed(servers) {
  const answer = await tiny(servers).chat.completions.create(asked, { headers: { "X-Request-Id": "mine-7" } });
  return { text: answer.choices[0].message.content, usage: answer.usage, request_id: answer._request_id };
}

async function streamed(servers) {
  const options = { ...asked, stream: true, stream_options: { include_usage: true } };
  let text = "";
  let usage = null;
  for await (const chunk of await tiny(servers).chat.completions.create(options)) {
    text += chunk.choices[0]?.delta?.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

/** The helper that puts chunks together, and its events. */
async function accumulated(servers) {
  const stream = tiny(servers).chat.completions.stream(asked);
  const deltas = [];
  stream.on("content", (delta) => deltas.push(delta));
  return [await stream.finalContent(), deltas.join("")];
}

/** A loop that stops reading: the package aborts the request. */
async function left_early(servers) {
  const stream = await tiny(servers).chat.completions.create({ ...asked, stream: true });
  let num_chunks = 0;
  for await (const _ of stream) {
    num_chunks += 1;
    break;
  }
  return [num_chunks, stream.controller.signal.aborted];
}

async function prompted(servers) {
  const options = { model: "tiny", prompt: "The capital of France is", temperature: 0, max_tokens: 4 };
  return (await tiny(servers).completions.create(options)).choices[0].text;
}

/** The package asks for base64 by itself and decodes it; `float` is the other way. */
async function embedded(servers) {
  const { embeddings } = tiny(servers);
  const [packed, plain] = [
    await embeddings.create({ model: "tiny", input: ["one", "two"] }),
    await embeddings.create({ model: "tiny", input: ["one", "two"], encoding_format: "float" }),
  ].map((answer) => answer.data.map((item) => item.embedding));
  return { lengths: packed.map((vector) => vector.length), equal: JSON.stringify(packed) === JSON.stringify(plain) };
}

async function parsed(servers) {
  const response_format = zodResponseFormat(Order, "order");
  const answer = await tiny(servers).chat.completions.parse({ ...asked, response_format, max_tokens: 200 });
  return answer.choices[0].message.parsed;
}

/** The helper that calls functions and sends their results until there is an answer; whole and streamed. */
async function tools_loop(servers) {
  const calls = [];
  const tool = {
    type: "function",
    function: {
      name: "get_weather",
      parse: JSON.parse,
      function: ({ city }) => calls.push(city) && "21 degrees",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  };
  const answers = [];
  for (const stream of [false, true]) {
    const messages = [{ role: "user", content: QUESTION }];
    const runner = toTools(servers).chat.completions.runTools({ model: "scripted", messages, tools: [tool], stream });
    answers.push(await runner.finalContent());
  }
  return { calls, answers };
}

async function responses(servers) {
  const client = tiny(servers);
  const options = { model: "tiny", instructions: MESSAGES[0].content, input: "Hello world!", temperature: 0 };
  const first = await client.responses.create(options);
  let text = "";
  for await (const event of await client.responses.create({ ...options, stream: true })) {
    if (event.type === "response.output_text.delta") text += event.delta;
  }
  const kept = await client.responses.retrieve(first.id);
  return [first.output_text, text, kept.output[0].content[0].text];
}

async function models(servers) {
  const ids = [];
  for await (const model of tiny(servers).models.list()) ids.push(model.id);
  return ids;
}

async function refused(servers) {
  const wrong = [
    () => tiny(servers).chat.completions.create({ ...asked, temperature: 9 }),
    () => tiny(servers, "wrong").chat.completions.create(asked),
    () => tiny(servers).chat.completions.create({ ...asked, model: "other" }),
  ];
  const errors = [];
  for (const call of wrong) {
    try {
      await call();
    } catch (error) {
      errors.push([error.constructor.name, error.status, error.param]);
    }
  }
  return errors;
}

const LINES = ["a", "b", "c"].map((custom_id) => {
  const body = { model: "fake", messages: [{ role: "user", content: custom_id }] };
  return JSON.stringify({ custom_id, method: "POST", url: "/v1/chat/completions", body });
});

/** A batch from a stream of its file to its results; then a file in parts, and a batch that is cancelled. */
async function batches(servers) {
  const client = new OpenAI({ baseURL: servers.batches, apiKey: KEY, maxRetries: 0 });
  const create = (input_file_id, more) =>
    client.batches.create({ input_file_id, endpoint: "/v1/chat/completions", completion_window: "24h", ...more });
  const folder = fs.mkdtempSync(path.join(os.tmpdir(), "batch-"));
  fs.writeFileSync(path.join(folder, "in.jsonl"), LINES.join("\n"));
  const file = await client.files.create({
    file: fs.createReadStream(path.join(folder, "in.jsonl")),
    purpose: "batch",
    expires_after: { anchor: "created_at", seconds: 3600 },
  });
  fs.rmSync(folder, { recursive: true });
  const processed = await client.files.waitForProcessing(file.id);
  const made = await create(file.id, { metadata: { night: "7" } });
  let over = made;
  while (over.status !== "completed") over = await client.batches.retrieve(made.id);
  const results = (await (await client.files.content(over.output_file_id)).text()).trim().split("\n");

  const upload = await client.uploads.create({ filename: "p.jsonl", purpose: "batch", bytes: 10, mime_type: "text/x" });
  const halves = [];
  for (const half of ["01234", "56789"]) {
    const part = await client.uploads.parts.create(upload.id, { data: await OpenAI.toFile(Buffer.from(half)) });
    halves.push(part.id);
  }
  const joined = await client.uploads.complete(upload.id, { part_ids: halves });

  const held = { role: "user", content: "wait" };
  const line = { ...JSON.parse(LINES[0]), body: { model: "fake", messages: [held] } };
  const waiting = await create((await client.files.create({
    file: await OpenAI.toFile(Buffer.from(JSON.stringify(line)), "held.jsonl"), purpose: "batch",
  })).id);
  const cancelling = await client.batches.cancel(waiting.id);
  const listed = [];
  for await (const batch of client.batches.list({ limit: 1 })) listed.push(batch.id);
  const files = [];
  for await (const one of client.files.list({ purpose: "batch", order: "asc", limit: 1 })) files.push(one.id);
  return {
    file: [file.filename, file.expires_at - file.created_at, processed.status],
    metadata: over.metadata,
    answers: results.map((result) => JSON.parse(result).response.body.choices[0].message.content),
    joined: await (await client.files.content(joined.file.id)).text(),
    cancelling: cancelling.status,
    newest_first: listed.indexOf(waiting.id) < listed.indexOf(made.id),
    oldest_first: files.indexOf(file.id) < files.indexOf(joined.file.id) && files.indexOf(file.id) >= 0,
    deleted: (await client.files.delete(file.id)).deleted,
  };
}

main(
  ...[completed, streamed, accumulated, left_early, prompted, embedded, parsed],
  ...[tools_loop, responses, models, refused, batches],
);
