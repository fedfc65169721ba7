// A client in another language, from the committed protos alone: lists, asks, streams, cancels, is refused.
// Usage: node client.mjs HOST:PORT QUESTION. Prints one JSON object; exits 1 if a call did not end as it must.
import { fileURLToPath } from "node:url";
import path from "node:path";
import grpc from "@grpc/grpc-js";
import loader from "@grpc/proto-loader";

const PROTOS = path.join(path.dirname(fileURLToPath(import.meta.url)), "..", "..", "protos");
const [target, question] = process.argv.slice(2);

const definition = loader.loadSync("headrace/v1/gateway.proto", {
  includeDirs: [PROTOS],
  keepCase: true, // field names as the contract has them
  longs: Number,
  enums: String,
  oneofs: true,
  defaults: true, // a zero that was not sent reads as zero
});
const { GatewayService } = grpc.loadPackageDefinition(definition).headrace.v1;
const client = new GatewayService(target, grpc.credentials.createInsecure());
const deadline = () => ({ deadline: Date.now() + 60_000 });

const ask = (more) => ({
  generation: {
    chat: { messages: [{ role: "CHAT_ROLE_USER", content: question }] },
    sampling: { temperature: 0 },
    metadata: { client: "node" },
    ...more,
  },
});

function unary(method, request) {
  return new Promise((resolve, reject) => {
    client[method](request, new grpc.Metadata(), deadline(), (error, response) =>
      error ? reject(error) : resolve(response),
    );
  });
}

// Reads a stream to its end; `onDelta(call, count)` may cancel it. Never rejects: the status is part of the result.
function stream(request, onDelta = () => {}) {
  return new Promise((resolve) => {
    const result = { texts: [], sequence_numbers: [], token_count: 0, final: null, status: "OK", trailing: {} };
    const call = client.GenerateStream(request, new grpc.Metadata(), deadline());
    call.on("data", (message) => {
      result.sequence_numbers.push(message.sequence_number);
      if (message.event === "final") {
        result.final = message.final;
        return;
      }
      result.texts.push(message.delta.text);
      result.token_count += message.delta.token_count;
      onDelta(call, result.texts.length);
    });
    call.on("error", (error) => (result.status = grpc.status[error.code]));
    call.on("status", (status) => {
      result.trailing = Object.fromEntries(
        Object.entries(status.metadata.getMap()).map(([key, value]) => [key, value.length]),
      );
      setImmediate(() => resolve(result)); // "error" comes in the same turn
    });
  });
}

async function refusal(request) {
  try {
    await unary("Generate", request);
    return null;
  } catch (error) {
    return { status: grpc.status[error.code], details: error.details, with_details: error.metadata.getMap() };
  }
}

try {
  const models = (await unary("ListModels", {})).models;
  const answer = await unary("Generate", ask());
  const streamed = await stream(ask());
  const cancelled = await stream(ask({ max_tokens: 512, stop: { ignore_eos: true } }), (call, count) => {
    if (count === 2) call.cancel();
  });
  const refused = await refusal(ask({ max_tokens: 0 }));
  if (refused) refused.with_details = "grpc-status-details-bin" in refused.with_details;
  process.stdout.write(`${JSON.stringify({ models, answer, streamed, cancelled, refused })}\n`);
} catch (error) {
  process.stderr.write(`${error.stack}\n`);
  process.exitCode = 1;
} finally {
  client.close();
}
