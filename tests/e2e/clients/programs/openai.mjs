// npm's openai: a stream with usage, and a tool loop whose call is streamed. Prints JSON.
import OpenAI from "openai";

const [baseURL] = process.argv.slice(2);
const client = new OpenAI({ baseURL, apiKey: "none", maxRetries: 0 });
const model = "small";

async function streamed() {
  const stream = await client.chat.completions.create({
    model,
    messages: [{ role: "user", content: "What is the capital of Japan?" }],
    temperature: 0,
    max_tokens: 40,
    stream: true,
    stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  return { text, usage };
}

async function toolLoop() {
  const tools = [{
    type: "function",
    function: {
      name: "weather",
      description: "The weather now.",
      parameters: {
        type: "object",
        properties: { city: { type: "string", maxLength: 20 } },
        required: ["city"],
        additionalProperties: false,
      },
    },
  }];
  const messages = [{ role: "user", content: "What is the weather in Oslo?" }];
  const asked = await client.chat.completions.stream({
    model, messages, tools, tool_choice: "required", parallel_tool_calls: false,
    temperature: 0, max_tokens: 120,
  }).finalChatCompletion();
  const { message, finish_reason } = asked.choices[0];
  const [call] = message.tool_calls;
  messages.push(message, { role: "tool", tool_call_id: call.id, content: "7 degrees" });
  const told = await client.chat.completions.create({
    model, messages, tools, tool_choice: "none", temperature: 0, max_tokens: 30,
  });
  return {
    reason: finish_reason,
    name: call.function.name,
    arguments: JSON.parse(call.function.arguments),
    answer: told.choices[0].message.content,
  };
}

console.log(JSON.stringify({ streamed: await streamed(), loop: await toolLoop() }));
