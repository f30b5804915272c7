// What every npm client's script does: the same as calls.py, for Node. Packages are found through NODE_PATH.

const KEY = "token-abc123";
const MESSAGES = [
  { role: "system", content: "You are a helpful assistant." },
  { role: "user", content: "Hello world!" },
];
const QUESTION = "What is the weather in Paris?";

/** Make all the calls and print one object on the last line: what each gave, by its name. */
async function main(...calls) {
  const [tiny, tools, batches] = process.argv.slice(2);
  const results = {};
  for (const call of calls) results[call.name] = await call({ tiny, tools, batches });
  console.log(JSON.stringify(results));
}

module.exports = { KEY, MESSAGES, QUESTION, main };
