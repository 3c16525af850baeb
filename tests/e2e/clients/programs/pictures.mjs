// npm's openai, @anthropic-ai/sdk and ollama, each with a picture of a file. Prints each answer, its
// prompt's tokens and, where the protocol counts them, those of pictures, as JSON.
import { readFileSync } from "node:fs";
import Anthropic from "@anthropic-ai/sdk";
import { Ollama } from "ollama";
import OpenAI from "openai";

const [url, file, question, limit] = process.argv.slice(2);
const tokens = Number(limit);
const model = "tiny";
const base64 = readFileSync(file, "base64");
const openai = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const anthropic = new Anthropic({ baseURL: url, apiKey: "none", maxRetries: 0 });
const ollama = new Ollama({ host: url });

async function chat() {
  const { choices, usage } = await openai.chat.completions.create({
    model,
    messages: [{
      role: "user",
      content: [
        { type: "image_url", image_url: { url: `data:image/png;base64,${base64}` } },
        { type: "text", text: question },
      ],
    }],
    temperature: 0,
    max_tokens: tokens,
  });
  return [
    choices[0].message.content, usage.prompt_tokens, usage.prompt_tokens_details.image_tokens,
  ];
}

async function responses() {
  const { output_text, usage } = await openai.responses.create({
    model,
    input: [{
      role: "user",
      content: [
        { type: "input_image", image_url: `data:image/png;base64,${base64}`, detail: "auto" },
        { type: "input_text", text: question },
      ],
    }],
    temperature: 0,
    max_output_tokens: tokens,
  });
  return [output_text, usage.input_tokens];
}

async function messages() {
  const { content, usage } = await anthropic.messages.create({
    model,
    messages: [{
      role: "user",
      content: [
        { type: "image", source: { type: "base64", media_type: "image/png", data: base64 } },
        { type: "text", text: question },
      ],
    }],
    temperature: 0,
    max_tokens: tokens,
  });
  return [content[0].text, usage.input_tokens + (usage.cache_read_input_tokens ?? 0)];
}

async function ollamaChat(images) {
  const { message, prompt_eval_count } = await ollama.chat({
    model,
    messages: [{ role: "user", content: question, images }],
    options: { temperature: 0, num_predict: tokens },
  });
  return [message.content, prompt_eval_count];
}

async function generate() {
  const { response, prompt_eval_count } = await ollama.generate({
    model,
    prompt: question,
    images: [base64],
    options: { temperature: 0, num_predict: tokens },
  });
  return [response, prompt_eval_count];
}

console.log(JSON.stringify({
  chat: await chat(),
  responses: await responses(),
  messages: await messages(),
  ollama_file: await ollamaChat([file]),
  ollama_bytes: await ollamaChat([new Uint8Array(readFileSync(file))]),
  generate: await generate(),
}));
