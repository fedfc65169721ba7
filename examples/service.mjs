// A Node service, from the protos alone: key, deadline, retry as the server says, stream.
//   npm install @grpc/grpc-js @grpc/proto-loader
//   HEADRACE_KEY=... node examples/service.mjs 127.0.0.1:50050 "A long text."
import path from "node:path";
import { fileURLToPath } from "node:url";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const root = path.join(path.dirname(fileURLToPath(import.meta.url)), "..");
const protos = loader.loadSync("headrace/v1/gateway.proto", {
  includeDirs: [path.join(root, "protos")],
  keepCase: true,
  longs: Number,
  enums: String,
  oneofs: true,
  defaults: true, // a zero that was not sent reads as zero
});
const { GatewayService } = grpc.loadPackageDefinition(protos).headrace.v1;
const [target, text] = process.argv.slice(2);
// A small window: what this reader has not taken is not generated far ahead.
const client = new GatewayService(target, grpc.credentials.createInsecure(), { "grpc-node.flow_control_window": 65535 });

const metadata = new grpc.Metadata();
if (process.env.HEADRACE_KEY) metadata.set("authorization", `Bearer ${process.env.HEADRACE_KEY}`);
const request = {
  generation: {
    chat: { messages: [{ role: "CHAT_ROLE_USER", content: `Summarise in one sentence: ${text}` }] },
    max_tokens: 60,
    sampling: { temperature: 0 },
  },
};

// UNAVAILABLE before the first message can be repeated; anything else is the caller's to decide.
for (let attempt = 0; ; attempt += 1) {
  let count = 0;
  const stream = client.GenerateStream(request, metadata, { deadline: Date.now() + 20_000 });
  try {
    for await (const message of stream) {
      count += 1;
      if (message.delta) process.stdout.write(message.delta.text);
      if (message.final) process.stdout.write(`\n${message.final.usage.completion_token_count} tokens\n`);
    }
    break;
  } catch (error) {
    if (count || attempt >= 3 || error.code !== grpc.status.UNAVAILABLE) {
      console.error(error.code === undefined ? error : `${grpc.status[error.code]}: ${error.details}`);
      process.exitCode = 1;
      break;
    }
    await new Promise((resolve) => setTimeout(resolve, Math.random() * 200 * 2 ** attempt));
  }
}
client.close();
