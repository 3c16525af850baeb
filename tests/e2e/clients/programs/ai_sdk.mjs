// The AI SDK: generateObject, and a tool loop of two steps. Prints JSON.
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateObject, generateText, stepCountIs, tool } from "ai";
import { z } from "zod";

const [baseURL] = process.argv.slice(2);
const provider = createOpenAICompatible({
  name: "home", baseURL, apiKey: "none", supportsStructuredOutputs: true,
});
const model = provider("small");

const { object } = await generateObject({
  model,
  schema: z.object({ city: z.string().max(20), rainy: z.boolean() }).strict(),
  prompt: "Oslo is rainy.",
  temperature: 0,
  maxOutputTokens: 120,
  maxRetries: 0,
});

const asked = [];
const looped = await generateText({
  model,
  prompt: "What is the weather in Oslo?",
  tools: {
    weather: tool({
      description: "The weather now.",
      inputSchema: z.object({ city: z.string().max(20) }).strict(),
      execute: async ({ city }) => { asked.push(city); return { city, degrees: 7 }; },
    }),
  },
  // A model so small would call again and again.
  prepareStep: ({ stepNumber }) => ({ toolChoice: stepNumber === 0 ? "required" : "none" }),
  stopWhen: stepCountIs(2),
  temperature: 0,
  maxOutputTokens: 120,
  maxRetries: 0,
});

console.log(JSON.stringify({
  object,
  asked,
  steps: looped.steps.length,
  reasons: looped.steps.map((step) => step.finishReason),
  text: looped.text,
}));
